/* Cutting blocks from slabs. */
#include "kernels/cpu/slab.h"

#include <assert.h>

#ifdef MEM_GUARDED
enum { SLAB_BYTES = 32 << 20, MAX_BLOCK = 0 };
#else
enum { SLAB_BYTES = 32 << 20, MAX_BLOCK = SLAB_BYTES / 4 }; /* so that at most a quarter stays unused */
#endif

struct slab {
    size_t used;  /* bytes, this header included; a multiple of 64 */
    int n_blocks; /* not given back */
};

enum { HEADER = 64 };
_Static_assert(sizeof(struct slab) <= HEADER, "blocks are aligned");

static slab *slab_new(void) {
    slab *s = mem_alloc_huge(SLAB_BYTES, 1);
    if (s) *s = (slab){.used = HEADER};
    return s;
}

void slab_pool_init(slab_pool *p) {
    *p = (slab_pool){0};
    pthread_mutex_init(&p->mutex, NULL);
}

void slab_pool_free(slab_pool *p) {
    assert(!p->current);
    pthread_mutex_destroy(&p->mutex);
}

/* Cut `room` bytes, a multiple of 64, under the mutex. */
static void *cut(slab_pool *p, size_t room, slab **owner) {
    slab *s = p->current;
    if (!s || s->used + room > SLAB_BYTES) {
        if (!(s = slab_new())) return NULL;
        p->current = s; /* the one before is left to its blocks: each slab in use has at least one */
    }
    void *block = (char *)s + s->used;
    s->used += room;
    s->n_blocks++;
    *owner = s;
    return block;
}

void *slab_take(slab_pool *p, size_t bytes, slab **owner) {
    *owner = NULL;
    if (bytes > MAX_BLOCK) return mem_alloc_huge(bytes, 1);
    pthread_mutex_lock(&p->mutex);
    void *block = cut(p, bytes ? (bytes + 63) / 64 * 64 : 64, owner);
    pthread_mutex_unlock(&p->mutex);
    return block;
}

void slab_drop(slab_pool *p, slab *owner, void *block) {
    if (!owner) {
        mem_free(block);
        return;
    }
    pthread_mutex_lock(&p->mutex);
    assert(block && owner->n_blocks > 0);
    bool last = --owner->n_blocks == 0;
    if (last && p->current == owner) p->current = NULL;
    pthread_mutex_unlock(&p->mutex);
    if (last) mem_free(owner);
}
