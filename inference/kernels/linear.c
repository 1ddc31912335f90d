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

/* R weight rows x M input rows; both constants after inlining, so the accumulators live in registers. P: the weights
 * come from memory, so the next group of rows, whose stream starts anew, is fetched ahead. */
static inline __attribute__((always_inline)) void block(
    const int R, const int M, const int P, const float *w, const float *x, const float *bias, float *y, int64_t in, int64_t out) {
    vec acc[8][8];
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) acc[r][m] = (vec){0};
    int64_t k = 0;
    for (; k + LANES <= in; k += LANES) {
        vec xs[8];
        for (int m = 0; m < M; m++) xs[m] = *(const vec *)(x + m * in + k);
        for (int r = 0; r < R; r++) {
            vec wr = *(const vec *)(w + r * in + k);
            if (P) __builtin_prefetch(w + (r + 4) * in + k);
            for (int m = 0; m < M; m++) acc[r][m] = multiply_add(wr, xs[m], acc[r][m]);
        }
    }
    if (k < in) { /* the tail goes through the same accumulators, padded with zeros */
        vec xs[8];
        for (int m = 0; m < M; m++) xs[m] = tail(x + m * in + k, in - k);
        for (int r = 0; r < R; r++) {
            vec wr = tail(w + r * in + k, in - k);
            for (int m = 0; m < M; m++) acc[r][m] = multiply_add(wr, xs[m], acc[r][m]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) y[m * out + r] = total(acc[r][m]) + (bias ? bias[r] : 0);
}

#define CASE(R, M) case M: if (p) block(R, M, 1, w, x, bias, y, in, out); else block(R, M, 0, w, x, bias, y, in, out); break;

static void rows1(int m, int p, const float *w, const float *x, const float *bias, float *y, int64_t in, int64_t out) {
    switch (m) { CASE(1, 1) CASE(1, 2) CASE(1, 3) CASE(1, 4) }
}

static void rows2(int m, int p, const float *w, const float *x, const float *bias, float *y, int64_t in, int64_t out) {
    switch (m) { CASE(2, 1) CASE(2, 2) CASE(2, 3) CASE(2, 4) }
}

static void rows4(int m, int p, const float *w, const float *x, const float *bias, float *y, int64_t in, int64_t out) {
    switch (m) { CASE(4, 1) CASE(4, 2) CASE(4, 3) case 4: rows2(4, p, w, x, bias, y, in, out);
                 rows2(4, p, w + 2 * in, x, bias ? bias + 2 : 0, y + 2, in, out); break; }
}

/* x [m, in], w [out, in], bias [out] or null, y [m, out]; all contiguous. Tiles of weight rows stay in the cache
 * while all input rows pass, four at a time; with up to four input rows there is one pass and the tile is small. */
void linear(const float *x, const float *w, const float *bias, float *y, int64_t m, int64_t in, int64_t out, int threads) {
    int64_t tile = m > 4 ? 32 : 4, tiles = (out + tile - 1) / tile;
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t t = 0; t < tiles; t++) {
        int64_t first = t * tile, last = first + tile < out ? first + tile : out;
        for (int64_t done = 0; done < m; done += 4) {
            int part = m - done < 4 ? (int)(m - done) : 4;
            const float *xs = x + done * in;
            int64_t o = first;
            for (; o + 4 <= last; o += 4)
                rows4(part, done == 0, w + o * in, xs, bias ? bias + o : 0, y + done * out + o, in, out);
            for (; o < last; o++) rows1(part, done == 0, w + o * in, xs, bias ? bias + o : 0, y + done * out + o, in, out);
        }
    }
}
