// Attention of many rows with tile instructions (AMX, bfloat16): keys and values are laid out once for all
// rows, then blocks of 32 rows pass over them with a running softmax (FlashAttention, Dao et al., 2022).
#include <stdlib.h>
#include <string.h>

#include <new>

#include "isa.h"
#include "threads.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LONGCHAT_AVX512
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,amx-tile,amx-bf16,prefer-vector-width=512")
#include "kernels.inl"

namespace {

constexpr int kRowBlock = 32;
constexpr int kKeyBlock = 128;
constexpr float kLog2E = 1.44269504f;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

inline int up(int n, int step) { return (n + step - 1) / step * step; }

// Pairs of 32 dimensions' channels of 16 keys: [dim / 2][keys][2], what a tile product wants on the right.
inline void lay_keys(const uint16_t* k, int64_t stride, int n, int dim, int padded_dim, uint16_t* to) {
  for (int slab = 0; slab < padded_dim; slab += 32, to += 512) {
    const __mmask32 mask = dim - slab < 32 ? 0xffff : 0xffffffff;
    __m512i x[16], y[16];
    for (int key = 0; key < 16; ++key)
      x[key] = key < n ? _mm512_maskz_loadu_epi16(mask, k + key * stride + slab) : _mm512_setzero_si512();
    // Pairs are 32 bits: rows and columns of 16 x 16 change places.
    for (int i = 0; i < 16; i += 4)
      for (int j = 0; j < 2; ++j) {
        const __m512i low = j ? _mm512_unpackhi_epi32(x[i], x[i + 1]) : _mm512_unpacklo_epi32(x[i], x[i + 1]);
        const __m512i high = j ? _mm512_unpackhi_epi32(x[i + 2], x[i + 3]) : _mm512_unpacklo_epi32(x[i + 2], x[i + 3]);
        y[i + 2 * j] = _mm512_unpacklo_epi64(low, high);
        y[i + 2 * j + 1] = _mm512_unpackhi_epi64(low, high);
      }
    for (int j = 0; j < 4; ++j) {
      const __m512i a = _mm512_shuffle_i32x4(y[j], y[4 + j], 0x88), b = _mm512_shuffle_i32x4(y[j], y[4 + j], 0xdd);
      const __m512i c = _mm512_shuffle_i32x4(y[8 + j], y[12 + j], 0x88), d = _mm512_shuffle_i32x4(y[8 + j], y[12 + j], 0xdd);
      _mm512_storeu_si512(to + j * 32, _mm512_shuffle_i32x4(a, c, 0x88));
      _mm512_storeu_si512(to + (4 + j) * 32, _mm512_shuffle_i32x4(b, d, 0x88));
      _mm512_storeu_si512(to + (8 + j) * 32, _mm512_shuffle_i32x4(a, c, 0xdd));
      _mm512_storeu_si512(to + (12 + j) * 32, _mm512_shuffle_i32x4(b, d, 0xdd));
    }
  }
}

// Pairs of 32 keys' values: [dim / 16][keys / 2][16][2].
inline void lay_values(const uint16_t* v, int64_t stride, int n, int dim, uint16_t* to) {
  for (int slab = 0; slab < dim; slab += 16)
    for (int pair = 0; pair < 16; ++pair, to += 32) {
      const uint16_t* from = v + 2 * pair * stride + slab;
      const __m256i none = _mm256_setzero_si256();
      const __m256i a = 2 * pair < n ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)) : none;
      const __m256i b = 2 * pair + 1 < n ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + stride)) : none;
      const __m512i both = _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
      _mm512_storeu_si512(to, both);
    }
}

// 2^x for x <= 0, with 16 bits; 0 far below.
inline __m512 exp2_of(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(x, 0), r = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(9.6181291e-3f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5504109e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4022651e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9314718e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

struct Keys {
  int64_t least, end;
};

// The keys of a span that any of these rows sees; least >= end where none does.
Keys seen_by(const LongchatSpan& span, int first, int rows) {
  Keys seen{span.keys, 0};
  for (int row = first; row < first + rows; ++row) {
    const int64_t start = span.start[row] > 0 ? span.start[row] : 0;
    const int64_t stop = span.stop[row] < span.keys ? span.stop[row] : span.keys;
    if (start >= stop) continue;
    seen.least = start < seen.least ? start : seen.least;
    seen.end = stop > seen.end ? stop : seen.end;
  }
  return seen;
}

struct Laid {
  int64_t first;  // the first key that is laid out, a multiple of kKeyBlock
  int64_t blocks;
  uint16_t *keys, *values;  // of a group: blocks x kKeyBlock keys
};

// What a thread works in.
struct alignas(64) TileRoom {
  uint16_t q[kRowBlock * kMaxDim];
  float logits[kRowBlock * kKeyBlock];
  uint16_t weights[kRowBlock * kKeyBlock];
  float out[kRowBlock * kMaxDim];
  float most[kRowBlock], total[kRowBlock], shrink[kRowBlock];
};

// logits [32 rows, 128 keys] = q [32, padded_dim] times a block of keys.
void multiply_keys(const uint16_t* q, int padded_dim, const uint16_t* keys, float* logits) {
  const int slabs = padded_dim / 32;
  for (int pair = 0; pair < kKeyBlock / 32; ++pair) {
    const uint16_t* left = keys + static_cast<int64_t>(2 * pair) * slabs * 512;
    const uint16_t* right = left + slabs * 512;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int slab = 0; slab < slabs; ++slab) {
      _tile_loadd(4, q + slab * 32, padded_dim * 2);
      _tile_loadd(5, q + 16 * padded_dim + slab * 32, padded_dim * 2);
      _tile_loadd(6, left + slab * 512, 64);
      _tile_loadd(7, right + slab * 512, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    float* to = logits + pair * 32;
    _tile_stored(0, to, kKeyBlock * 4);
    _tile_stored(1, to + 16, kKeyBlock * 4);
    _tile_stored(2, to + 16 * kKeyBlock, kKeyBlock * 4);
    _tile_stored(3, to + 16 * kKeyBlock + 16, kKeyBlock * 4);
  }
}

// out [32 rows, dim] += weights [32, 128 keys] times a block of values.
void multiply_values(const uint16_t* weights, const uint16_t* values, int dim, float* out) {
  const int slabs = dim / 16;
  for (int half = 0; half < 2; ++half)
    for (int slab = 0; slab < slabs; slab += 2) {
      float* to = out + half * 16 * dim + slab * 16;
      const bool two = slab + 1 < slabs;
      _tile_loadd(0, to, dim * 4);
      if (two) _tile_loadd(1, to + 16, dim * 4);
      for (int part = 0; part < kKeyBlock / 32; ++part) {
        const uint16_t* from = values + (static_cast<int64_t>(part) * slabs + slab) * 512;
        _tile_loadd(4, weights + half * 16 * kKeyBlock + part * 32, kKeyBlock * 2);
        _tile_loadd(6, from, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (two) {
          _tile_loadd(7, from + 512, 64);
          _tile_dpbf16ps(1, 4, 7);
        }
      }
      _tile_stored(0, to, dim * 4);
      if (two) _tile_stored(1, to + 16, dim * 4);
    }
}

// One block's logits to weights, the running maximum and sum; `low` and `high` per row within the block.
void soften_block(const LongchatAttention& a, TileRoom& room, int rows, const int* low, const int* high) {
  const __m512 factor = _mm512_set1_ps(a.softcap > 0 ? kLog2E : a.scale * kLog2E);
  bool shrinks = false;
  for (int row = 0; row < rows; ++row) {
    float* logits = room.logits + row * kKeyBlock;
    if (a.softcap > 0)
      for (int j = 0; j < kKeyBlock; ++j)
        logits[j] = a.softcap * (2.0f * sigmoid(2.0f * logits[j] * a.scale / a.softcap) - 1.0f);
    if (low[row] > 0 || high[row] < kKeyBlock)
      for (int j = 0; j < kKeyBlock; ++j)
        logits[j] = j >= low[row] && j < high[row] ? logits[j] : -__builtin_inff();
    __m512 x[kKeyBlock / 16], most = _mm512_set1_ps(-__builtin_inff());
    for (int j = 0; j < kKeyBlock / 16; ++j) {
      x[j] = _mm512_mul_ps(_mm512_loadu_ps(logits + 16 * j), factor);
      most = _mm512_max_ps(most, x[j]);
    }
    const float found = _mm512_reduce_max_ps(most), before = room.most[row];
    const float now = found > before ? found : before;
    // A row that has seen nothing yet stays at nothing.
    const __m512 peak = _mm512_set1_ps(now > -1e30f ? now : 0.0f);
    __m512 sum = _mm512_setzero_ps();
    for (int j = 0; j < kKeyBlock / 16; j += 2) {
      const __m512 p = exp2_of(_mm512_max_ps(_mm512_sub_ps(x[j], peak), _mm512_set1_ps(-200.0f)));
      const __m512 r = exp2_of(_mm512_max_ps(_mm512_sub_ps(x[j + 1], peak), _mm512_set1_ps(-200.0f)));
      sum = _mm512_add_ps(sum, _mm512_add_ps(p, r));
      _mm512_storeu_si512(room.weights + row * kKeyBlock + 16 * j, (__m512i)_mm512_cvtne2ps_pbh(r, p));
    }
    const float shrink = now > before ? (before > -1e30f ? _mm512_cvtss_f32(exp2_of(_mm512_set1_ps(before - now))) : 0.0f) : 1.0f;
    room.shrink[row] = shrink;
    shrinks |= shrink != 1.0f;
    room.total[row] = room.total[row] * shrink + _mm512_reduce_add_ps(sum);
    room.most[row] = now;
  }
  if (!shrinks) return;
  for (int row = 0; row < rows; ++row)
    for (int i = 0; i < a.dim; ++i) room.out[row * a.dim + i] *= room.shrink[row];
}

void attend_block(const LongchatAttention& a, const Laid* laid, TileRoom& room, int head, int first, int padded_dim) {
  const int rows = a.rows - first < kRowBlock ? a.rows - first : kRowBlock;
  const int64_t block_keys = static_cast<int64_t>(kKeyBlock) * padded_dim, block_values = static_cast<int64_t>(kKeyBlock) * a.dim;
  for (int row = 0; row < kRowBlock; ++row) {
    room.most[row] = a.sinks ? a.sinks[head] * kLog2E : -__builtin_inff();
    room.total[row] = a.sinks ? 1.0f : 0.0f;
  }
  memset(room.out, 0, sizeof(float) * kRowBlock * a.dim);
  memset(room.weights, 0, sizeof(room.weights));
  for (int s = 0; s < a.n_spans; ++s) {
    const LongchatSpan& span = a.spans[s];
    const int group = head / (a.heads / span.groups);
    memset(room.q, 0, sizeof(uint16_t) * kRowBlock * padded_dim);
    for (int row = 0; row < rows; ++row) {
      const uint16_t* q = a.q + head * a.q_head + (first + row) * a.q_row;
      if (span.cos)
        turn(q, span, first + row, a.dim, room.q + row * padded_dim);
      else
        memcpy(room.q + row * padded_dim, q, a.dim * 2);
    }
    const auto [least, end] = seen_by(span, first, rows);
    for (int64_t at = least / kKeyBlock * kKeyBlock; at < end; at += kKeyBlock) {
      int low[kRowBlock], high[kRowBlock];
      for (int row = 0; row < rows; ++row) {
        const int64_t start = span.start[first + row] - at, stop = (span.stop[first + row] < span.keys ? span.stop[first + row] : span.keys) - at;
        low[row] = static_cast<int>(start < 0 ? 0 : start > kKeyBlock ? kKeyBlock : start);
        high[row] = static_cast<int>(stop < 0 ? 0 : stop > kKeyBlock ? kKeyBlock : stop);
      }
      const int64_t block = group * laid[s].blocks + (at - laid[s].first) / kKeyBlock;
      multiply_keys(room.q, padded_dim, laid[s].keys + block * block_keys, room.logits);
      soften_block(a, room, rows, low, high);
      multiply_values(room.weights, laid[s].values + block * block_values, a.dim, room.out);
    }
  }
  for (int row = 0; row < rows; ++row) {
    const float inverse = room.total[row] > 0 ? 1.0f / room.total[row] : 0.0f;
    uint16_t* out = a.out + head * a.out_head + (first + row) * a.out_row;
    for (int i = 0; i < a.dim; ++i) out[i] = narrow(room.out[row * a.dim + i] * inverse);
  }
}

void attend_many(const LongchatAttention* a) {
  const int padded_dim = up(a->dim, 32);
  Laid laid[16];
  int64_t bytes = 0, blocks = 0, first_block[17];
  for (int s = 0; s < a->n_spans; ++s) {
    const LongchatSpan& span = a->spans[s];
    const auto [least, end] = seen_by(span, 0, a->rows);
    laid[s].first = least / kKeyBlock * kKeyBlock;
    laid[s].blocks = end > laid[s].first ? (end - laid[s].first + kKeyBlock - 1) / kKeyBlock : 0;
    first_block[s] = blocks;
    blocks += laid[s].blocks * span.groups;
    bytes += laid[s].blocks * span.groups * kKeyBlock * (padded_dim + a->dim) * 2 + 128;
  }
  scratch.reset(bytes + a->threads * static_cast<int64_t>(sizeof(TileRoom)) + 64);
  for (int s = 0; s < a->n_spans; ++s) {
    const int64_t keys = laid[s].blocks * a->spans[s].groups * kKeyBlock;
    laid[s].keys = scratch.take<uint16_t>(keys * padded_dim);
    laid[s].values = scratch.take<uint16_t>(keys * a->dim);
  }
  TileRoom* rooms = scratch.take<TileRoom>(a->threads);
  const int64_t row_blocks = (a->rows + kRowBlock - 1) / kRowBlock;
  parallel(a->threads, [&](Team& team, int thread) {
    TileRoom& room = rooms[thread];
    int64_t begin, end;
    while (team.take(0, blocks, 1, &begin, &end)) {
      int s = a->n_spans - 1;
      while (first_block[s] > begin) --s;
      const LongchatSpan& span = a->spans[s];
      const int64_t block = begin - first_block[s], group = block / laid[s].blocks;
      const int64_t first = laid[s].first + block % laid[s].blocks * kKeyBlock;
      for (int part = 0; part < kKeyBlock; part += 16) {
        const int64_t left = span.keys - first - part;
        lay_keys(span.k + group * span.k_head + (first + part) * span.k_key, span.k_key,
                 static_cast<int>(left < 0 ? 0 : left), a->dim, padded_dim,
                 laid[s].keys + (block * kKeyBlock + part) * padded_dim);
        if (part % 32 == 0)
          lay_values(span.v + group * span.v_head + (first + part) * span.v_key, span.v_key,
                     static_cast<int>(left < 0 ? 0 : left), a->dim,
                     laid[s].values + (block * kKeyBlock + part) * a->dim);
      }
    }
    team.barrier();
    const TileConfig config;
    _tile_loadconfig(&config);
    // The last rows see most and take longest: they go first.
    while (team.take(0, row_blocks * a->heads, 1, &begin, &end))
      attend_block(*a, laid, room, static_cast<int>(begin % a->heads),
                   static_cast<int>(row_blocks - 1 - begin / a->heads) * kRowBlock, padded_dim);
    _tile_release();
  });
}

// Whether the CPU has the tiles and the kernel lets this process use them.
bool available() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512bw")) return false;
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

}  // namespace

int longchat_attends_many() {
  static const bool found = available();
  return found;
}
int longchat_attend_many(const LongchatAttention* a) {
  try {
    attend_many(a);
    return 1;
  } catch (const std::bad_alloc&) {
    return 0;
  }
}

#else

int longchat_attends_many() { return 0; }
int longchat_attend_many(const LongchatAttention*) { return 1; }

#endif
