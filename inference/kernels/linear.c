/* y[m][o] = sum_k x[m][k] * w[o][k] (+ bias[o]) for few rows m: every weight is read once, whatever m is.
 *
 * Decoding a few tokens is bound by reading weights; general matrix kernels read them again, or compute row by
 * row, when m is 2..8. Here one vector accumulator runs over k for each (m, o), so the result of a row does not
 * depend on how many rows are computed with it: verification over n tokens equals n single steps bit for bit in
 * the linear layers. Compilers fuse multiplications and additions in some of the variants and not in others, so
 * that is switched off (-ffp-contract=off) and done by hand.
 */
#include <stdint.h>
#include "vector.h"

/* The block of outputs computed together: 4 weight rows, or 2, and as many input rows as the registers hold. */
#if defined(__AVX512F__)
#define MOST 6
#define FULL(M) 4
#else
#define MOST 4
#define FULL(M) ((M) < 4 ? 4 : 2)
#endif

#define UNROLL _Pragma("GCC unroll 8") /* or the accumulators would live in memory */

/* R weight rows x M input rows; both constants after inlining, so the accumulators live in registers. P: the weights
 * come from memory, so the next group of rows, whose stream starts anew, is fetched ahead. */
static inline __attribute__((always_inline)) void block(
    const int R, const int M, const int P, const float *w, const float *x, const float *bias, float *y, int64_t in, int64_t out) {
    vec acc[4][MOST];
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int m = 0; m < M; m++) acc[r][m] = (vec){0};
    int64_t k = 0;
    for (; k + LANES <= in; k += LANES) {
        vec xs[MOST];
        UNROLL
        for (int m = 0; m < M; m++) xs[m] = *(const vec *)(x + m * in + k);
        UNROLL
        for (int r = 0; r < R; r++) {
            vec wr = *(const vec *)(w + r * in + k);
            if (P) __builtin_prefetch(w + (r + 4) * in + k);
            UNROLL
            for (int m = 0; m < M; m++) acc[r][m] = multiply_add(wr, xs[m], acc[r][m]);
        }
    }
    if (k < in) { /* the tail goes through the same accumulators, padded with zeros */
        vec xs[MOST];
        UNROLL
        for (int m = 0; m < M; m++) xs[m] = tail(x + m * in + k, in - k);
        UNROLL
        for (int r = 0; r < R; r++) {
            vec wr = tail(w + r * in + k, in - k);
            UNROLL
            for (int m = 0; m < M; m++) acc[r][m] = multiply_add(wr, xs[m], acc[r][m]);
        }
    }
    UNROLL
    for (int m = 0; m < M; m++) {
        four sums = totals(acc[0][m], acc[R > 1 ? 1 : 0][m], acc[R > 2 ? 2 : 0][m], acc[R > 2 ? 3 : 0][m]);
        UNROLL
        for (int r = 0; r < R; r++) y[m * out + r] = sums[r] + (bias ? bias[r] : 0);
    }
}

/* Four weight rows (R = 4: in one block or two), or one, over 1..MOST input rows. */
static inline __attribute__((always_inline)) void rows(
    const int R, const int M, int p, const float *w, const float *x, const float *bias, float *y, int64_t in, int64_t out) {
    const int step = R < FULL(M) ? R : FULL(M);
    for (int r = 0; r < R; r += step) {
        if (p) block(step, M, 1, w + r * in, x, bias ? bias + r : 0, y + r, in, out);
        else block(step, M, 0, w + r * in, x, bias ? bias + r : 0, y + r, in, out);
    }
}

#define CASE(R, M) case M: rows(R, M, p, w, x, bias, y, in, out); break;
#if MOST == 6
#define CASES(R) CASE(R, 1) CASE(R, 2) CASE(R, 3) CASE(R, 4) CASE(R, 5) CASE(R, 6)
#else
#define CASES(R) CASE(R, 1) CASE(R, 2) CASE(R, 3) CASE(R, 4)
#endif

static void rows1(int m, int p, const float *w, const float *x, const float *bias, float *y, int64_t in, int64_t out) {
    switch (m) { CASES(1) }
}

static void rows4(int m, int p, const float *w, const float *x, const float *bias, float *y, int64_t in, int64_t out) {
    switch (m) { CASES(4) }
}

/* x [m, in], w [out, in], bias [out] or null, y [m, out]; all contiguous. Tiles of weight rows stay in the cache
 * while all input rows pass, in even parts of at most MOST; when one pass takes all input rows the tile is small. */
void linear(const float *x, const float *w, const float *bias, float *y, int64_t m, int64_t in, int64_t out, int threads) {
    int64_t tile = m > MOST ? 32 : 4, tiles = (out + tile - 1) / tile;
    int64_t passes = (m + MOST - 1) / MOST, wide = (m + passes - 1) / passes;
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t t = 0; t < tiles; t++) {
        int64_t first = t * tile, last = first + tile < out ? first + tile : out;
        for (int64_t done = 0; done < m; done += wide) {
            int part = m - done < wide ? (int)(m - done) : (int)wide;
            const float *xs = x + done * in;
            int64_t o = first;
            for (; o + 4 <= last; o += 4)
                rows4(part, done == 0, w + o * in, xs, bias ? bias + o : 0, y + done * out + o, in, out);
            for (; o < last; o++) rows1(part, done == 0, w + o * in, xs, bias ? bias + o : 0, y + done * out + o, in, out);
        }
    }
}
