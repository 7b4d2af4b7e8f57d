// Copies between pieces of device memory (this device's, or a peer's that is mapped here).
//
// blockIdx.x is the piece; the blocks of its row (blockIdx.y) share it in slices.  The descriptors lie in pinned host
// memory, so that a batch needs no copy of its own before its first byte moves.
//
// The kernels of blocks work the addresses out themselves (see transfer.blocks): blockIdx.x is a piece of a block.
//
// copy.ptx is made of this file by scripts/kernels; the driver compiles that for whatever GPU it finds.

struct Piece {
    unsigned long long source, target, length;  // addresses, bytes
};

constexpr int THREADS = 256;
constexpr int UNROLL = 4;
constexpr unsigned long long SLICE = 32768;  // bytes

__device__ __forceinline__ void move_wide(const Piece& piece) {
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

__device__ __forceinline__ void move_bytes(const Piece& piece) {
    const unsigned char* source = reinterpret_cast<const unsigned char*>(piece.source);
    unsigned char* target = reinterpret_cast<unsigned char*>(piece.target);
    for (unsigned long long first = blockIdx.y * SLICE; first < piece.length; first += gridDim.y * SLICE) {
        const unsigned long long end = first + SLICE < piece.length ? first + SLICE : piece.length;
        for (unsigned long long i = first + threadIdx.x; i < end; i += THREADS) target[i] = source[i];
    }
}

// What of the blocks, one after another, lies in bytes [start, end) of the whole, and is or shall be at `staged`.
struct Window {
    const unsigned long long* shape;   // base, stride, size, offset in the block; for each piece of a block
    const unsigned long long* blocks;  // their numbers
    unsigned long long pieces, size;   // of a block; the size in bytes
    unsigned long long first;          // index of the first of these blocks
    unsigned long long start, end, staged;
    unsigned long long inward;  // 1: from `staged` to the blocks
};

__device__ __forceinline__ Piece piece_of(const Window& window) {
    const unsigned long long index = window.first + blockIdx.x / window.pieces;
    const unsigned long long* row = window.shape + 4 * (blockIdx.x % window.pieces);
    const unsigned long long begin = index * window.size + row[3], end = begin + row[2];
    const unsigned long long low = begin > window.start ? begin : window.start;
    const unsigned long long high = end < window.end ? end : window.end;
    const unsigned long long at = row[0] + window.blocks[index] * row[1] + (low - begin);
    const unsigned long long staged = window.staged + (low - window.start);
    const unsigned long long length = low < high ? high - low : 0;
    return window.inward ? Piece{staged, at, length} : Piece{at, staged, length};
}

// Addresses and lengths are multiples of 16.
extern "C" __global__ void __launch_bounds__(THREADS) copy_wide(const Piece* pieces) {
    __shared__ Piece piece;
    if (threadIdx.x == 0) piece = pieces[blockIdx.x];
    __syncthreads();
    move_wide(piece);
}

// Any addresses and lengths.
extern "C" __global__ void __launch_bounds__(THREADS) copy_bytes(const Piece* pieces) {
    __shared__ Piece piece;
    if (threadIdx.x == 0) piece = pieces[blockIdx.x];
    __syncthreads();
    move_bytes(piece);
}

extern "C" __global__ void __launch_bounds__(THREADS) blocks_wide(const Window window) {
    __shared__ Piece piece;
    if (threadIdx.x == 0) piece = piece_of(window);
    __syncthreads();
    move_wide(piece);
}

extern "C" __global__ void __launch_bounds__(THREADS) blocks_bytes(const Window window) {
    __shared__ Piece piece;
    if (threadIdx.x == 0) piece = piece_of(window);
    __syncthreads();
    move_bytes(piece);
}
