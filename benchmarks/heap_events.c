/* Counts bytes in malloc blocks of SMALLEST and more, at each malloc and free of any thread: loaded with LD_PRELOAD.
   A thread that looks now and then misses peaks that are shorter than its interval; this misses none. */
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <unistd.h>

#define SMALLEST 65536

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static atomic_long live, peak;

static void *added(void *block)
{
    if (block) {
        long size = (long)malloc_usable_size(block);
        if (size >= SMALLEST) {
            long now = atomic_fetch_add(&live, size) + size, most = atomic_load(&peak);
            while (now > most && !atomic_compare_exchange_weak(&peak, &most, now))
                ;
        }
    }
    return block;
}

static void removed(void *block)
{
    if (block) {
        long size = (long)malloc_usable_size(block);
        if (size >= SMALLEST)
            atomic_fetch_sub(&live, size);
    }
}

long heap_events_live(void) { return atomic_load(&live); }
long heap_events_peak(void) { return atomic_load(&peak); }
void heap_events_reset(void) { atomic_store(&peak, atomic_load(&live)); }

void *malloc(size_t size) { return added(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return added(__libc_calloc(count, size)); }
void *memalign(size_t alignment, size_t size) { return added(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return added(__libc_memalign(alignment, size)); }
void *valloc(size_t size) { return added(__libc_memalign((size_t)sysconf(_SC_PAGESIZE), size)); }

int posix_memalign(void **block, size_t alignment, size_t size)
{
    *block = added(__libc_memalign(alignment, size));
    return *block ? 0 : ENOMEM;
}

void *realloc(void *block, size_t size)
{
    /* The old size must be read before the block may go. */
    long old = block ? (long)malloc_usable_size(block) : 0;
    void *made = __libc_realloc(block, size);
    if (old >= SMALLEST && (made || size == 0))
        atomic_fetch_sub(&live, old);
    return added(made);
}

void free(void *block)
{
    int error = errno;
    removed(block);
    __libc_free(block);
    errno = error;
}
