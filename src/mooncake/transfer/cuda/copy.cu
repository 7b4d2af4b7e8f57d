// Copies between pieces of device memory (this device's, or a peer's that is mapped here).
//
// blockIdx.x is the piece; the blocks of its row (blockIdx.y) share it in slices.  The descriptors lie in pinned host
// memory, so that a batch needs no copy of its own before its first byte moves.
//
// copy.ptx is made of this file by scripts/kernels; the driver compiles that for whatever GPU it finds.

struct Piece {
    unsigned long long source, target, length;  // addresses, bytes
};

constexpr int THREADS = 256;
constexpr int UNROLL = 4;
constexpr unsigned long long SLICE = 32768;  // bytes

// Addresses and lengths are multiples of 16.
extern "C" __global__ void __launch_bounds__(THREADS) copy_wide(const Piece* pieces) {
    __shared__ Piece piece;
    if (threadIdx.x == 0) piece = pieces[blockIdx.x];
    __syncthreads();
    const uint4* source = reinterpret_cast<const uint4*>(piece.source);
    uint4* target = reinterpret_cast<uint4*>(piece.target);
    constexpr unsigned long long STEP = SLICE / sizeof(uint4);
    const unsigned long long count = piece.length / sizeof(uint4);
    for (unsigned long long first = blockIdx.y * STEP; first < count; first += gridDim.y * STEP) {
        const unsigned long long end = first + STEP < count ? first + STEP : count;
        unsigned long long i = first + threadIdx.x;
        for (; i + (UNROLL - 1) * THREADS < end; i += UNROLL * THREADS) {
            uint4 held[UNROLL];
#pragma unroll
            for (int k = 0; k < UNROLL; ++k) held[k] = __ldcs(source + i + k * THREADS);
#pragma unroll
            for (int k = 0; k < UNROLL; ++k) __stcs(target + i + k * THREADS, held[k]);
        }
        for (; i < end; i += THREADS) __stcs(target + i, __ldcs(source + i));
    }
}

// Any addresses and lengths.
extern "C" __global__ void __launch_bounds__(THREADS) copy_bytes(const Piece* pieces) {
    __shared__ Piece piece;
    if (threadIdx.x == 0) piece = pieces[blockIdx.x];
    __syncthreads();
    const unsigned char* source = reinterpret_cast<const unsigned char*>(piece.source);
    unsigned char* target = reinterpret_cast<unsigned char*>(piece.target);
    for (unsigned long long first = blockIdx.y * SLICE; first < piece.length; first += gridDim.y * SLICE) {
        const unsigned long long end = first + SLICE < piece.length ? first + SLICE : piece.length;
        for (unsigned long long i = first + threadIdx.x; i < end; i += THREADS) target[i] = source[i];
    }
}
