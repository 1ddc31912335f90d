/* Attention of a few queries a row over cached keys and values: grouped heads without copying them, and only the
 * slots a query may see. One query's result does not depend on how many are computed with it.
 */
#include <math.h>
#include <stdint.h>
#include "vector.h"

/* exp for x <= 0 by 2^i * 2^f, polynomial of 2^f on [-0.5, 0.5]; relative error below 2e-7. */
static inline vec exp_vec(vec x) {
    vec t = x * 1.44269504f;
    t = choose(t < -125.0f, fill(-125.0f), t);
    ivec i = __builtin_convertvector(t - 0.5f, ivec);
    vec f = (t - __builtin_convertvector(i, vec)) * 0.69314718f;
    const float terms[] = {8.3333333e-3f, 0.041666667f, 0.16666667f, 0.5f, 1.0f, 1.0f};
    vec p = fill(1.3888889e-3f);
    for (int t = 0; t < 6; t++) p = multiply_add(p, f, fill(terms[t]));
    ivec bits = (i + 127) << 23;
    return p * (vec)bits;
}

/* Products of a query with four keys. */
static inline __attribute__((always_inline)) four dots(const float *q, const float *k[4], int64_t d) {
    vec acc[4] = {(vec){0}, (vec){0}, (vec){0}, (vec){0}};
    for (int64_t c = 0; c < d; c += LANES)
        for (int j = 0; j < 4; j++) acc[j] = multiply_add(*(const vec *)(q + c), *(const vec *)(k[j] + c), acc[j]);
    return totals(acc[0], acc[1], acc[2], acc[3]);
}

static float largest(const float *scores, int64_t count) {
    float top = scores[0];
    int64_t j = 0;
    if (count >= LANES) {
        vec tops = *(const vec *)scores;
        for (; j + LANES <= count; j += LANES) {
            vec s = *(const vec *)(scores + j);
            tops = choose(s > tops, s, tops);
        }
        for (int i = 0; i < LANES; i++) top = tops[i] > top ? tops[i] : top;
    }
    for (; j < count; j++) top = scores[j] > top ? scores[j] : top;
    return top;
}

/* scores[0..count) -> exp(score - max), and their sum. */
static float soften(float *scores, int64_t count) {
    float top = largest(scores, count);
    vec sums = (vec){0};
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES) {
        vec e = exp_vec(*(vec *)(scores + j) - top);
        *(vec *)(scores + j) = e;
        sums += e;
    }
    if (j < count) {
        vec e = exp_vec(tail(scores + j, count - j) - top);
        for (int64_t t = 0; t < count - j; t++) { scores[j + t] = e[t]; sums[t] += e[t]; }
    }
    return total(sums);
}

static void one_query(const float *q, const float *k, const float *v, const uint8_t *seen, float *out, float *scores,
                      int64_t first, int64_t last, int64_t nodes, int64_t k_slot, int64_t v_slot, int64_t d,
                      float scale) {
    int64_t count = last - first;
    for (int64_t j = 0; j < count; j += 4) { /* a last incomplete four repeats its first slot */
        int part = count - j < 4 ? (int)(count - j) : 4;
        const float *at = k + (first + j) * k_slot;
        const float *keys[4] = {at, part > 1 ? at + k_slot : at, part > 2 ? at + 2 * k_slot : at, part > 3 ? at + 3 * k_slot : at};
        four products = dots(q, keys, d);
        for (int i = 0; i < part; i++) scores[j + i] = scale * products[i];
    }
    for (int64_t j = 0; j < nodes; j++)
        if (!seen[j]) scores[count - nodes + j] = -INFINITY;
    float norm = 1.0f / soften(scores, count);
    for (int64_t c = 0; c < d; c += 4 * LANES) {
        vec acc[4] = {(vec){0}, (vec){0}, (vec){0}, (vec){0}};
        int parts = d - c < 4 * LANES ? (int)((d - c) / LANES) : 4;
        for (int64_t j = 0; j < count; j++)
            for (int p = 0; p < parts; p++)
                acc[p] = multiply_add(fill(scores[j]), *(const vec *)(v + (first + j) * v_slot + c + p * LANES), acc[p]);
        for (int p = 0; p < parts; p++) *(vec *)(out + c + p * LANES) = acc[p] * norm;
    }
}

/* q [batch, heads, n, d] with strides q_row, q_head, q_pos; k, v [batch, groups, slots, d] with strides *_row,
 * *_head, *_slot; spans [batch, n, 2] int64: first and one past the last slot a query sees; seen [batch, n, nodes]:
 * which of the span's last `nodes` slots it really sees, those of a tree; out [batch, n, heads, d] contiguous; scratch
 * [threads, slots]. d is a multiple of LANES.
 */
void attention(const float *q, const float *k, const float *v, const int64_t *spans, const uint8_t *seen, float *out,
               float *scratch, int64_t batch, int64_t heads, int64_t groups, int64_t n, int64_t d, int64_t slots,
               int64_t nodes, int64_t q_row, int64_t q_head, int64_t q_pos, int64_t k_row, int64_t k_head,
               int64_t k_slot, int64_t v_row, int64_t v_head, int64_t v_slot, float scale, int threads) {
    int64_t share = heads / groups;
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads) collapse(2)
    for (int64_t b = 0; b < batch; b++)
        for (int64_t h = 0; h < heads; h++) {
            float *scores = scratch + slots * thread_number();
            const float *kh = k + b * k_row + (h / share) * k_head, *vh = v + b * v_row + (h / share) * v_head;
            for (int64_t i = 0; i < n; i++) {
                const int64_t *span = spans + 2 * (b * n + i);
                one_query(q + b * q_row + h * q_head + i * q_pos, kh, vh, seen + (b * n + i) * nodes,
                          out + ((b * n + i) * heads + h) * d, scores, span[0], span[1], nodes, k_slot, v_slot, d,
                          scale);
            }
        }
}

#define MANY 16384 /* values from which a second thread pays for itself */

/* y = x / rms(x) * weight over rows of width values. */
void rms_norm(const float *x, const float *weight, float *y, int64_t rows, int64_t width, float eps, int threads) {
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > MANY)
    for (int64_t r = 0; r < rows; r++) {
        const float *xr = x + r * width;
        float *yr = y + r * width;
        vec acc = (vec){0};
        int64_t k = 0;
        for (; k + LANES <= width; k += LANES) { vec v = *(const vec *)(xr + k); acc = multiply_add(v, v, acc); }
        if (k < width) { vec v = tail(xr + k, width - k); acc = multiply_add(v, v, acc); }
        float factor = 1.0f / sqrtf(total(acc) / width + eps);
        for (k = 0; k < width; k++) yr[k] = xr[k] * factor * weight[k];
    }
}

/* y = silu(gate) * up; gate and up are the halves of rows [2 * width]. */
void silu_mul(const float *gate_up, float *y, int64_t rows, int64_t width, int threads) {
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > MANY)
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = gate_up + 2 * r * width, *up = gate + width;
        float *yr = y + r * width;
        int64_t k = 0;
        for (; k + LANES <= width; k += LANES) {
            vec g = *(const vec *)(gate + k), e = exp_vec(choose(g < 0.0f, g, -g));
            *(vec *)(yr + k) = g * *(const vec *)(up + k) * choose(g < 0.0f, e, fill(1.0f)) / (1.0f + e);
        }
        for (; k < width; k++) yr[k] = gate[k] / (1.0f + expf(-gate[k])) * up[k];
    }
}
