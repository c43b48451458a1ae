/* Proves the usual elements of long lists without a branch on each byte. Used by proxy/walk.pyx.

   The way of simdjson (Langdale and Lemire, "Parsing Gigabytes of JSON per Second", 2019): each class of bytes is a mask
   with one bit per byte, and a rule is a shift and an and of masks.

   Each function takes the place where an element begins, in a list without spaces, and returns the place where an
   element begins before which all are proved: the same one where nothing is. `end` is the end of the body; nothing at or
   behind it is read. What is refused here is only not proved: the walk then looks at that element by itself. */

#ifndef LOGPROB_SIDECAR_BLOCKS_H
#define LOGPROB_SIDECAR_BLOCKS_H

#include <stdint.h>

typedef const unsigned char *place_t;

#if defined(__SSE2__) && defined(__GNUC__)

#include <immintrin.h>
#include <string.h>

/* The bytes behind those of `mask`; `carry` holds the last one from block to block. */
static inline uint64_t behind(uint64_t mask, uint64_t *carry)
{
    const uint64_t moved = mask << 1 | *carry;
    *carry = mask >> 63;
    return moved;
}

/* Counts the elements that end with a `comma` before the first `bad` byte; the place behind the last of them, or else
   what was `proved` before this block. */
static inline place_t elements(uint64_t comma, uint64_t bad, place_t at, place_t proved, long *count)
{
    const uint64_t good = bad ? comma & ((bad & -bad) - 1) : comma;
    *count += __builtin_popcountll(good);
    return good ? at + 64 - __builtin_clzll(good) : proved;
}

#define VECTOR __m128i
#define WIDTH 16
#define INTRINSIC(name) _mm_##name
#define LOAD(place) _mm_loadu_si128((const __m128i *)(place))
#define NAMED(function) function##_sse2
#include "blocks_rules.h"

#if defined(__clang__) /* has no such pragma */

#define CHOSEN(function) function##_sse2

#else

#pragma GCC push_options
#pragma GCC target("avx2,bmi,popcnt")
#define VECTOR __m256i
#define WIDTH 32
#define INTRINSIC(name) _mm256_##name
#define LOAD(place) _mm256_loadu_si256((const __m256i *)(place))
#define NAMED(function) function##_avx2
#include "blocks_rules.h"
#pragma GCC pop_options

#define CHOSEN(function)                                                                                               \
    (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt")               \
         ? function##_avx2                                                                                             \
         : function##_sse2)

#endif

static inline place_t prove_integers(place_t at, place_t end, long *count)
{
    return CHOSEN(prove_integers)(at, end, count);
}

static inline place_t prove_strings(place_t at, place_t end, long *count)
{
    return CHOSEN(prove_strings)(at, end, count);
}

static inline place_t prove_logprobs(place_t at, place_t end, long *count)
{
    return CHOSEN(prove_logprobs)(at, end, count);
}

static inline place_t prove_repeats(place_t at, place_t end, place_t *name, place_t *logprob)
{
    return CHOSEN(prove_repeats)(at, end, name, logprob);
}

#else /* nothing is proved: each element is looked at by itself */

static inline place_t prove_integers(place_t at, place_t end, long *count) { (void)end; (void)count; return at; }
static inline place_t prove_strings(place_t at, place_t end, long *count) { (void)end; (void)count; return at; }
static inline place_t prove_logprobs(place_t at, place_t end, long *count) { (void)end; (void)count; return at; }
static inline place_t prove_repeats(place_t at, place_t end, place_t *name, place_t *logprob)
{
    (void)end; (void)name; (void)logprob;
    return at;
}

#endif
#endif
