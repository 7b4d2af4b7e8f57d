"""Which of several masters leads: elections in etcd, redis or a Kubernetes lease, and how others find who was elected.

Every election has a *term*, higher than any before; it is the term in the segments' tables, in grants and in leases.
"""
