"""Device memory: what it is, and moving bytes between it and host memory or other device memory.

driver   the CUDA driver's functions, by address; nothing is loaded until an address may be a device's
device   one GPU, and the copies
crossing copies across the bus, in steps
lanes    what a call at a time needs: streams, staging memory, descriptors
plan     pieces of a batch as descriptors of the copy kernel
pins     host memory that copy engines may reach without the processor's help
peers    device memory of other processes, mapped here

Needs the driver alone (libcuda.so.1): no torch, no CUDA toolkit, no compiler.
"""
