/* Counts the live bytes of the process's allocations of LEAST bytes and more, and the most there were. Preloaded before libc.
   Smaller ones are the interpreter's. A benchmark counts from a page on, so that no tensor that matters is left out; the meter's test asks for more. */
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

enum { PAGE = 4096 };
#ifndef LEAST
#define LEAST PAGE
#endif
static _Atomic long live = 0, peak = 0;

static void *taken(void *block) {
  size_t size = block ? malloc_usable_size(block) : 0;
  if (size >= LEAST) {
    long now = atomic_fetch_add(&live, (long)size) + (long)size, high = atomic_load(&peak);
    while (now > high && !atomic_compare_exchange_weak(&peak, &high, now)) {
    }
  }
  return block;
}

static void given(void *block) {
  size_t size = block ? malloc_usable_size(block) : 0;
  if (size >= LEAST) atomic_fetch_sub(&live, (long)size);
}

void *malloc(size_t size) { return taken(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return taken(__libc_calloc(count, size)); }
void *memalign(size_t align, size_t size) { return taken(__libc_memalign(align, size)); }
void *aligned_alloc(size_t align, size_t size) { return memalign(align, size); }
void *valloc(size_t size) { return memalign(PAGE, size); }
void free(void *block) {
  given(block);
  __libc_free(block);
}
void *realloc(void *block, size_t size) {
  given(block);
  void *moved = __libc_realloc(block, size);
  return taken(moved || !size ? moved : block), moved;
}
int posix_memalign(void **block, size_t align, size_t size) {
  void *found = memalign(align, size);
  if (!found) return ENOMEM;
  *block = found;
  return 0;
}
long allocations_live(void) { return atomic_load(&live); }
long allocations_peak(void) { return atomic_load(&peak); }
void allocations_restart(void) { atomic_store(&peak, atomic_load(&live)); }
