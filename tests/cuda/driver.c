// A stand-in for the CUDA driver: what mooncake uses of it, on the processor, as strictly as the real one or more so.
//
// Device memory is a file in memory whose address is reserved but not accessible, so that whoever touches it without
// the driver faults.  Work is queued by stream and done as late as it may be (when somebody waits for it), or at once
// with FAKE_CUDA_EAGER=1; so code that reuses memory too early goes wrong under one of the two.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef unsigned long long address;
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, ILLEGAL_ADDRESS = 700 };
enum { DEVICES = 2, MOST = 4096 };

typedef struct { address base, size; char* hidden; int device, fd, imported, used; uint64_t number; } Allocation;
typedef struct { address base, size; int used; } Pin;
typedef struct { char bytes[64]; } Handle;
typedef struct { int pid, fd, device; address size; } Exported;
typedef struct { address *shape, *blocks, pieces, size, first, start, end, staged, inward; } Window;
typedef struct Operation {
    int kind; address target, source, size; unsigned count; struct Operation* next; Window window;
} Operation;
typedef struct { Operation *first, **last; uint64_t queued, done; int device; } Stream;
typedef struct { Stream* stream; uint64_t upto; } Event;
enum { TO_DEVICE, TO_HOST, WITHIN, WIDE, BYTES, BLOCKS_WIDE, BLOCKS_BYTES, AWAIT };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Allocation allocations[MOST];
static Pin pins[MOST];
static uint64_t numbers;
static int initialized, eager, dead;
static address left = 1ull << 40;
static __thread int contexts[16], depth, mode;

static int device_now(void) { return depth ? contexts[depth - 1] : -1; }

static Allocation* allocation_of(address at, address size) {
    for (int i = 0; i < MOST; ++i)
        if (allocations[i].used && at >= allocations[i].base && at + size <= allocations[i].base + allocations[i].size)
            return &allocations[i];
    return NULL;
}

static char* inside(address at, address size) {
    Allocation* found = allocation_of(at, size);
    return found ? found->hidden + (at - found->base) : NULL;
}

static int is_pinned(address at, address size) {
    for (int i = 0; i < MOST; ++i)
        if (pins[i].used && at >= pins[i].base && at + size <= pins[i].base + pins[i].size) return 1;
    return 0;
}

static int run(Stream* stream, uint64_t upto);

static int perform_blocks(Operation* op) {
    Window* w = &op->window;
    address blocks = op->count / w->pieces;
    if (op->count % w->pieces || !is_pinned((address)w->shape, 32 * w->pieces)) return ILLEGAL_ADDRESS;
    if (!is_pinned((address)w->blocks, 8 * (w->first + blocks))) return ILLEGAL_ADDRESS;
    for (address i = 0; i < op->count; ++i) {
        address index = w->first + i / w->pieces, *row = w->shape + 4 * (i % w->pieces);
        address begin = index * w->size + row[3], end = begin + row[2];
        address low = begin > w->start ? begin : w->start, high = end < w->end ? end : w->end;
        if (low >= high) continue;
        address at = row[0] + w->blocks[index] * row[1] + (low - begin), staged = w->staged + (low - w->start);
        if (op->kind == BLOCKS_WIDE && ((at | staged | (high - low)) & 15)) return ILLEGAL_ADDRESS;
        char *here = inside(at, high - low), *there = inside(staged, high - low);
        if (!here || !there) return ILLEGAL_ADDRESS;
        memmove(w->inward ? here : there, w->inward ? there : here, high - low);
    }
    return OK;
}

static int perform(Operation* op) {
    if (op->kind == AWAIT) return run((Stream*)op->source, op->size);
    if (op->kind == TO_DEVICE || op->kind == TO_HOST) {
        char* device = inside(op->kind == TO_DEVICE ? op->target : op->source, op->size);
        address host = op->kind == TO_DEVICE ? op->source : op->target;
        if (!device || !is_pinned(host, op->size)) return ILLEGAL_ADDRESS;
        if (op->kind == TO_DEVICE) memcpy(device, (void*)host, op->size);
        else memcpy((void*)host, device, op->size);
        return OK;
    }
    if (op->kind == WITHIN) {
        char *target = inside(op->target, op->size), *source = inside(op->source, op->size);
        if (!target || !source) return ILLEGAL_ADDRESS;
        memmove(target, source, op->size);
        return OK;
    }
    if (op->kind == BLOCKS_WIDE || op->kind == BLOCKS_BYTES) return perform_blocks(op);
    if (!is_pinned(op->source, op->count * 24ull)) return ILLEGAL_ADDRESS;
    address* row = (address*)op->source;
    for (unsigned i = 0; i < op->count; ++i, row += 3) {
        if (op->kind == WIDE && ((row[0] | row[1] | row[2]) & 15)) return ILLEGAL_ADDRESS;
        char *source = inside(row[0], row[2]), *target = inside(row[1], row[2]);
        if (!source || !target) return ILLEGAL_ADDRESS;
        memmove(target, source, row[2]);
    }
    return OK;
}

static int run(Stream* stream, uint64_t upto) {
    while (stream && stream->done < upto) {
        Operation* op = stream->first;
        stream->first = op->next;
        if (!op->next) stream->last = &stream->first;
        ++stream->done;
        int code = dead ? dead : perform(op);  // an error in a kernel ends the whole process's CUDA
        if (!dead) dead = code;
        free(op);
    }
    return dead;
}

static int queue_with(Stream* stream, int kind, address target, address source, address size, unsigned count,
                      Window* window) {
    if (dead) return dead;
    if (device_now() < 0) return INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    Operation* op = malloc(sizeof *op);
    *op = (Operation){kind, target, source, size, count, NULL};
    if (window) op->window = *window;
    *stream->last = op;
    stream->last = &op->next;
    ++stream->queued;
    int code = eager ? run(stream, stream->queued) : OK;
    pthread_mutex_unlock(&lock);
    return code;
}

static int queue(Stream* stream, int kind, address target, address source, address size, unsigned count) {
    return queue_with(stream, kind, target, source, size, count, NULL);
}

int cuInit(unsigned flags) {
    initialized = 1;
    eager = getenv("FAKE_CUDA_EAGER") != NULL;
    if (getenv("FAKE_CUDA_MEMORY")) left = strtoull(getenv("FAKE_CUDA_MEMORY"), NULL, 10);
    return OK;
}
int cuGetErrorName(int code, const char** name) {
    *name = code == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
          : code == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
          : "CUDA_ERROR_UNKNOWN";
    return OK;
}
int cuDeviceGetCount(int* count) { *count = DEVICES; return OK; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return ordinal < DEVICES ? OK : INVALID_DEVICE; }
int cuDeviceGetUuid(char* uuid, int device) { memset(uuid, 0x40 + device, 16); return OK; }
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)(intptr_t)(device + 1); return OK; }
int cuCtxPushCurrent_v2(void* context) { contexts[depth++] = (int)(intptr_t)context - 1; return OK; }
int cuCtxPopCurrent_v2(void** context) {
    if (!depth) return INVALID_CONTEXT;
    *context = (void*)(intptr_t)(contexts[--depth] + 1);
    return OK;
}
int cuCtxGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return OK; }
int cuThreadExchangeStreamCaptureMode(int* other) { int was = mode; mode = *other; *other = was; return OK; }
int fake_depth(void) { return depth; }
int fake_mode(void) { return mode; }

int cuStreamCreateWithPriority(Stream** stream, unsigned flags, int priority) {
    if (device_now() < 0) return INVALID_CONTEXT;
    *stream = calloc(1, sizeof **stream);
    (*stream)->last = &(*stream)->first;
    (*stream)->device = device_now();
    return OK;
}
int cuStreamWaitEvent(Stream* stream, Event* event, unsigned flags) {
    return queue(stream, AWAIT, 0, (address)event->stream, event->upto, 0);
}
int cuEventCreate(Event** event, unsigned flags) { *event = calloc(1, sizeof **event); return OK; }
int cuEventRecord(Event* event, Stream* stream) {
    event->stream = stream;
    event->upto = stream->queued;
    return dead;
}
int cuEventSynchronize(Event* event) {
    pthread_mutex_lock(&lock);
    int code = run(event->stream, event->upto);
    pthread_mutex_unlock(&lock);
    return code;
}

static int allocate(address* base, int fd, address size, int device, int imported) {
    address room = (size + 4095) & ~4095ull;
    char* hidden = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    void* shown = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (hidden == MAP_FAILED || shown == MAP_FAILED) return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; ++i)
        if (!allocations[i].used) {
            allocations[i] = (Allocation){(address)shown, size, hidden, device, fd, imported, 1, ++numbers};
            break;
        }
    pthread_mutex_unlock(&lock);
    *base = (address)shown;
    return OK;
}
int cuMemAlloc_v2(address* base, size_t size) {
    if (device_now() < 0) return INVALID_CONTEXT;
    if (size > left) return OUT_OF_MEMORY;
    left -= size;
    int fd = memfd_create("fake-device", 0);
    if (fd < 0 || ftruncate(fd, (size + 4095) & ~4095ull)) return OUT_OF_MEMORY;
    return allocate(base, fd, size, device_now(), 0);
}
int cuMemFree_v2(address base) {
    int code = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; ++i)
        if (allocations[i].used && allocations[i].base == base) {
            address room = (allocations[i].size + 4095) & ~4095ull;
            munmap(allocations[i].hidden, room);
            munmap((void*)base, room);
            close(allocations[i].fd);
            allocations[i].used = 0;
            left += allocations[i].imported ? 0 : allocations[i].size;
            code = OK;
        }
    pthread_mutex_unlock(&lock);
    return code;
}
int cuPointerGetAttributes(unsigned count, int* wanted, void** values, address at) {
    pthread_mutex_lock(&lock);
    Allocation* found = initialized ? allocation_of(at, 1) : NULL;
    for (unsigned i = 0; i < count; ++i) switch (wanted[i]) {
        case 2: *(unsigned*)values[i] = found ? 2 : 0; break;
        case 7: *(uint64_t*)values[i] = found ? found->number : 0; break;
        case 8: *(unsigned*)values[i] = 0; break;
        case 9: *(int*)values[i] = found ? found->device : -2; break;
        case 11: *(address*)values[i] = found ? found->base : 0; break;
        case 12: *(size_t*)values[i] = found ? found->size : 0; break;
    }
    pthread_mutex_unlock(&lock);
    return initialized ? OK : NOT_INITIALIZED;
}

static int pin(address base, address size) {
    int code = OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; ++i)
        if (pins[i].used && base < pins[i].base + pins[i].size && pins[i].base < base + size) {
            pthread_mutex_unlock(&lock);
            return ALREADY_REGISTERED;
        }
    for (int i = 0; i < MOST; ++i)
        if (!pins[i].used) { pins[i] = (Pin){base, size, 1}; code = OK; break; }
    pthread_mutex_unlock(&lock);
    return code;
}
int cuMemHostAlloc(void** base, size_t size, unsigned flags) {
    if (device_now() < 0) return INVALID_CONTEXT;
    *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return pin((address)*base, size);
}
int cuMemHostRegister_v2(address base, size_t size, unsigned flags) {
    unsigned char seen;
    if (device_now() < 0) return INVALID_CONTEXT;
    if (getenv("FAKE_CUDA_NO_PINS")) return OUT_OF_MEMORY;
    if (mincore((void*)(base & ~4095ull), 4096, &seen)) return INVALID_VALUE;
    return pin(base, size);
}
int cuMemHostUnregister(address base) {
    int code = NOT_REGISTERED;
    unsigned char seen;
    if (mincore((void*)(base & ~4095ull), 4096, &seen)) return INVALID_VALUE;  // unmapped too early
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; ++i)
        if (pins[i].used && pins[i].base == base) { pins[i].used = 0; code = OK; }
    pthread_mutex_unlock(&lock);
    return code;
}
int fake_pins(void) {
    int count = 0;
    for (int i = 0; i < MOST; ++i) count += pins[i].used;
    return count;
}

int cuMemcpyHtoDAsync_v2(address to, address from, size_t size, Stream* stream) { return queue(stream, TO_DEVICE, to, from, size, 0); }
int cuMemcpyDtoHAsync_v2(address to, address from, size_t size, Stream* stream) { return queue(stream, TO_HOST, to, from, size, 0); }
int cuMemcpyDtoDAsync_v2(address to, address from, size_t size, Stream* stream) { return queue(stream, WITHIN, to, from, size, 0); }
int cuModuleLoadData(void** module, const char* text) {
    *module = (void*)1;
    return device_now() < 0 ? INVALID_CONTEXT : strstr(text, ".version") ? OK : INVALID_VALUE;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
    static const char* names[] = {"copy_wide", "copy_bytes", "blocks_wide", "blocks_bytes"};
    for (int i = 0; i < 4; ++i)
        if (!strcmp(name, names[i])) {
            *function = (void*)(intptr_t)(WIDE + i);
            return OK;
        }
    return INVALID_VALUE;
}
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz,
                   unsigned shared, Stream* stream, void** arguments, void** extra) {
    if (!x || !y || y > 65535 || tx > 1024) return INVALID_VALUE;
    int kind = (int)(intptr_t)function;
    if (kind >= BLOCKS_WIDE) return queue_with(stream, kind, 0, 0, 0, x, arguments[0]);
    return queue(stream, kind, 0, *(address*)arguments[0], 0, x);
}

int cuIpcGetMemHandle(Handle* handle, address base) {
    pthread_mutex_lock(&lock);
    Allocation* found = allocation_of(base, 1);
    Exported made = {getpid(), found ? found->fd : -1, found ? found->device : -1, found ? found->size : 0};
    int code = found && found->base == base && !found->imported && !getenv("FAKE_CUDA_NO_IPC") ? OK : INVALID_VALUE;
    pthread_mutex_unlock(&lock);
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &made, sizeof made);
    return code;
}
int cuIpcOpenMemHandle_v2(address* base, Handle handle, unsigned flags) {
    Exported from;
    char path[64];
    memcpy(&from, &handle, sizeof from);
    if (device_now() < 0 || from.pid == getpid()) return INVALID_CONTEXT;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", from.pid, from.fd);
    int fd = open(path, O_RDWR);
    return fd < 0 ? INVALID_VALUE : allocate(base, fd, from.size, from.device, 1);
}
int cuIpcCloseMemHandle(address base) { return cuMemFree_v2(base); }

// For tests: what a program that owns device memory would do through its own library.
int fake_allocate(address* base, size_t size, int device) {
    cuInit(0);
    cuCtxPushCurrent_v2((void*)(intptr_t)(device + 1));
    int code = cuMemAlloc_v2(base, size);
    --depth;
    return code;
}
int fake_free(address base) { return cuMemFree_v2(base); }
int fake_write(address to, const char* from, size_t size) {
    char* target = inside(to, size);
    if (target) memcpy(target, from, size);
    return target ? OK : INVALID_VALUE;
}
int fake_read(address from, char* to, size_t size) {
    char* source = inside(from, size);
    if (source) memcpy(to, source, size);
    return source ? OK : INVALID_VALUE;
}
int fake_dead(void) { return dead; }
