// Decoding on the CPU: products of low-bit weights with a few rows, attention of a few rows over spans, and
// what stands between them. Everything takes raw pointers; Python keeps the memory.
#pragma once

#include <cstdint>

extern "C" {

// Weights [rows, cols] in tiles of 16 rows, padded with zeros. A tile is a run of records, one for each 32
// columns: the codes of 16 x 32 weights, then the scales and, unless `offset` is set, the minima of 16 rows
// (float16; for groups of 16 columns two each). A weight is scale x code + minimum, or scale x (code - offset).
// bits 4: byte 4 r + t of the j-th 64 bytes holds columns 4 j + t (low half) and 16 + 4 j + t (high half) of
// row r. bits 5: the same, then a fifth bit of every code, 8 words of 64. bits 8: column 4 j + t in the j-th
// 64 bytes. bits 16: plain bfloat16 rows, no tiles.
struct LongchatLinear {
  const uint8_t* codes;
  int32_t rows, cols;
  int32_t bits;
  int32_t group;   // columns that share a scale: 16 or 32
  float offset;    // -1: minima are stored
};

// The weights [out, width] of the last product. With `rest`, `upper` has the upper four bits of each alone, and `rest`
// what these leave, a row after another: for each 32 columns a byte of columns i (low half) and 16 + i for i below 16,
// then the scale, or those of both 16 columns (float16). It adds scale x (code - 8).
struct LongchatHead {
  LongchatLinear upper;
  const uint8_t* rest;  // or null
};

// A decoder layer. Pointers that a model has no use for are null, parts of a product that are one have no rows.
struct LongchatBlock {
  const float *attention_norm, *mlp_norm;    // [width], factors
  const float *q_norm, *k_norm;              // [dim]
  const float *after_attention, *after_mlp;  // [width]: norms of a branch before it joins the residual
  const float *qkv_bias, *o_bias;            // [heads x dim of q, k, v], [width]
  LongchatLinear qkv[3], o[1], gate_up[2], down[1];
};

struct LongchatModel {
  int32_t heads, kv_heads, dim, width, hidden;
  int32_t gelu;  // the gate's activation: 0 SiLU, 1 GELU (tanh)
  int32_t threads;
  float eps;
};

// Keys and values of one attention call that a query row sees from start[row] to stop[row], or, with `index`,
// those of them that it lists (-1: none), a list for each group and run of 64 rows. Strides are in elements;
// keys and values are bfloat16.
struct LongchatSpan {
  const uint16_t *k, *v;
  int64_t k_head, k_key, v_head, v_key;
  const float *cos, *sin;  // [rows, planes] by which queries are turned for this span, or null
  const int64_t *start, *stop;  // [rows]
  const int64_t* index;         // [groups, runs, listed] or null
  int64_t listed, index_group, index_run;
  int32_t groups;
  int32_t planes, interleaved;  // channel i turns with i + planes, or 2 i with 2 i + 1
  int32_t observe;       // 0 no, 1 maximum, 2 mean, 3 sum over the heads of a KV group
  int32_t observe_rows;  // 0 the last row, 1 the sum over rows, of each head
  int32_t observe_groups;
  int64_t keys;
  float* observed;  // [observe_groups, keys]
};

struct LongchatAttention {
  const LongchatSpan* spans;
  const uint16_t* q;   // [heads, rows, dim]
  int64_t q_head, q_row;
  const float* sinks;  // [heads] or null
  uint16_t* out;       // [heads, rows, dim]
  int64_t out_head, out_row;
  int32_t n_spans, heads, rows, dim, threads;
  float scale, softcap;  // softcap 0: none
};

// What a step needs of a layer's state: what its queries see, and where the new keys and values, which are among
// that, go in up to two buffers (null: none); heads so far apart, rows one after another.
struct LongchatLayer {
  const LongchatSpan* spans;
  uint16_t *k[2], *v[2];
  int64_t k_head[2], v_head[2];
  const float *cos, *sin;  // [rows, planes], of the new tokens
  int32_t n_spans, planes;
};

struct LongchatStep {
  const LongchatModel* model;
  const LongchatBlock* blocks;
  const LongchatLayer* layers;
  const float* norm;           // [width], before the last product
  const LongchatHead* head;    // the last product
  float* x;                    // [rows, width]; changed
  uint16_t* q;                 // [layers, heads, rows, dim]: the queries, for whoever wants them
  float* logits;               // [rows, out]
  int64_t* spent;              // nanoseconds of the calling thread, added to those of each phase, or null
  int32_t n_layers, rows;
  float scale;
};

// Changes whenever something here does.
int longchat_abi();
// "avx512", "avx2", "neon" or "portable": what this CPU is served by.
const char* longchat_isa();
// Serve by another one that this CPU has; 0 when it has not.
int longchat_use(const char* isa);

// What returns an int returns 0 when there was not enough memory. Rows are eight at most where not said otherwise.

// y [rows, out] = x [rows, width] W^T, x normed by `norm` [width] unless it is null; x and y are float32. Of weights
// with a rest, a row's results within 12 of its largest are those of all bits, the others of the upper ones.
int longchat_logits(const LongchatHead*, const float* norm, float eps, const float* x, float* y, int rows,
                    int threads);

// Norm, q, k, v products, q and k norms and rotation (cos, sin [rows, planes]) of x [rows, width].
// q [heads, rows, dim], k and v [kv_heads, rows, dim], bfloat16, contiguous.
int longchat_enter(const LongchatModel*, const LongchatBlock*, const float* x, int rows, const float* cos,
                    const float* sin, int planes, uint16_t* q, uint16_t* k, uint16_t* v);
// The attention's out [heads, rows, dim] joins x [rows, width], then the MLP.
int longchat_leave(const LongchatModel*, const LongchatBlock*, float* x, int rows, const uint16_t* out,
                    int64_t out_head, int64_t out_row);

int longchat_attend(const LongchatAttention*);

// Tokens through all layers in one call: as enter, attend and leave for each, then logits.
int longchat_step(const LongchatStep*);

// The same for many rows, with tile instructions where this CPU has them: no lists, nothing observed.
int longchat_attends_many();
int longchat_attend_many(const LongchatAttention*);
// As enter and leave; activations and weights are rounded to bfloat16, sums are float32. A row's results do not
// depend on those beside it.
int longchat_enter_many(const LongchatModel*, const LongchatBlock*, const float* x, int rows, const float* cos,
                        const float* sin, int planes, uint16_t* q, uint16_t* k, uint16_t* v);
int longchat_leave_many(const LongchatModel*, const LongchatBlock*, float* x, int rows, const uint16_t* out,
                        int64_t out_head, int64_t out_row);

// index [heads, count]: where the largest of scores [heads, n] are, the largest first, the earlier one of equals,
// each taken as the largest of `width` neighbours (those beyond the ends are 0). 1 <= count <= n.
int longchat_rank(const float* scores, int heads, int64_t n, int64_t width, int64_t count, int64_t* index,
                  int threads);

// to [heads, n, bytes], whose heads are so many bytes apart, = the entries at `index` [heads, n] of x, whose heads and entries are so many bytes apart.
void longchat_gather(const char* x, int64_t head, int64_t entry, const int64_t* index, char* to,
                     int64_t to_head, int heads, int64_t n, int64_t bytes, int threads);

// Memory in large pages, its content undefined; null where there is none. Given back with the same size.
char* longchat_take(int64_t bytes);
void longchat_give(char* block, int64_t bytes);

// The same steps for many rows, whose products are somebody else's.
// x += add (bfloat16 or null; normed by `after` first if given); out = norm(x), bfloat16.
void longchat_add_norm(float* x, const uint16_t* add, const float* after, const float* weight, uint16_t* out,
                       int rows, int width, float eps, int threads);
// q, k, v [rows, heads x dim] as products gave them, rows `stride` apart -> as longchat_enter gives them.
int longchat_rotate(const LongchatModel*, const LongchatBlock*, const uint16_t* const qkv[3],
                     const int64_t stride[3], int rows, const float* cos, const float* sin, int planes,
                     uint16_t* q, uint16_t* k, uint16_t* v);
// out [rows, hidden] = act(gate) * up, bfloat16; gate and up have rows `stride` apart.
void longchat_gated(const LongchatModel*, const uint16_t* gate, const uint16_t* up, int64_t stride, int rows,
                    uint16_t* out);
}
