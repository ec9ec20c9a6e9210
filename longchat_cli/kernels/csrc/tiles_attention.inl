// Attention of many rows with tile instructions (AMX, bfloat16): keys and values are laid out once for all
// rows, then blocks of 32 rows pass over them with a running softmax (FlashAttention, Dao et al., 2022).

namespace {

constexpr int kKeyBlock = 128;
constexpr float kLog2E = 1.44269504f;

// Pairs of channels of 16 keys (or of columns of 16 rows of weights): [dim / 32][pair][key][2], what a tile product
// wants on the right.
inline void lay_keys(const uint16_t* k, int64_t stride, int n, int dim, int padded_dim, uint16_t* to) {
  for (int slab = 0; slab < padded_dim; slab += 32, to += 512) {
    const __mmask32 mask = dim - slab < 32 ? (1u << (dim - slab)) - 1 : 0xffffffff;
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

// 2^x for x <= 0, relative error 1e-4: what it is rounded to keeps 8 bits. 0 far below.
inline __m512 exp2_of(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(x, 0), r = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(5.5171150e-2f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4261014e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9326098e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.99992813f));
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

constexpr int kHeadsAtOnce = 4;  // heads of a KV group that pass over a block of keys one after another

// What a thread works in.
struct alignas(64) TileRoom {
  struct alignas(64) Head {
    uint16_t q[kRowBlock * kMaxDim];
    float out[kRowBlock * kMaxDim];
    float total[kRowBlock * 16];  // sums in 16 lanes
    float most[kRowBlock];
  } heads[kHeadsAtOnce];
  float logits[kRowBlock * kKeyBlock];
  uint16_t weights[kRowBlock * kKeyBlock];
  float shrink[kRowBlock];
};

// What a block of rows sees of a block of keys: row r those from low[r] to high[r], all of them some of the
// kPart keys' parts from first to end.
constexpr int kPart = 32;
struct Sight {
  int low[kRowBlock], high[kRowBlock], first, end;
  bool whole;  // every row sees all of these parts
};

Sight sight_of(const LongchatSpan& span, int first_row, int rows, int64_t at) {
  Sight sight{{}, {}, kKeyBlock, 0, true};
  for (int row = 0; row < rows; ++row) {
    const int64_t stop = (span.stop[first_row + row] < span.keys ? span.stop[first_row + row] : span.keys) - at;
    const int64_t start = span.start[first_row + row] - at;
    const int low = static_cast<int>(start < 0 ? 0 : start > kKeyBlock ? kKeyBlock : start);
    const int high = static_cast<int>(stop < low ? low : stop > kKeyBlock ? kKeyBlock : stop);
    sight.low[row] = low;
    sight.high[row] = high;
    if (low == high) continue;
    sight.first = low < sight.first ? low : sight.first;
    sight.end = high > sight.end ? high : sight.end;
  }
  sight.first /= kPart;
  sight.end = (sight.end + kPart - 1) / kPart;
  for (int row = 0; row < rows; ++row)
    sight.whole = sight.whole && sight.low[row] <= sight.first * kPart && sight.high[row] >= sight.end * kPart;
  return sight;
}

// logits [32 rows, parts of 128 keys] = q [32, padded_dim] times a block of keys.
void multiply_keys(const uint16_t* q, int padded_dim, const uint16_t* keys, const Sight& sight, float* logits) {
  const int slabs = padded_dim / 32;
  for (int part = sight.first; part < sight.end; ++part) {
    const uint16_t* left = keys + static_cast<int64_t>(2 * part) * slabs * 512;
    const uint16_t* right = left + slabs * 512;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int slab = 0; slab < slabs; ++slab) {
      _tile_loadd(4, q + slab * 32, padded_dim * 2);
      _tile_loadd(6, left + slab * 512, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, right + slab * 512, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, q + 16 * padded_dim + slab * 32, padded_dim * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    float* to = logits + part * kPart;
    _tile_stored(0, to, kKeyBlock * 4);
    _tile_stored(1, to + 16, kKeyBlock * 4);
    _tile_stored(2, to + 16 * kKeyBlock, kKeyBlock * 4);
    _tile_stored(3, to + 16 * kKeyBlock + 16, kKeyBlock * 4);
  }
}

// out [32 rows, dim] += weights [32, parts of 128 keys] times a block of values.
void multiply_values(const uint16_t* weights, const uint16_t* values, int dim, const Sight& sight, float* out) {
  const int slabs = dim / 16;
  for (int slab = 0; slab < slabs; slab += 2) {
    float *upper = out + slab * 16, *lower = upper + 16 * dim;
    const bool two = slab + 1 < slabs;
    _tile_loadd(0, upper, dim * 4);
    _tile_loadd(2, lower, dim * 4);
    if (two) _tile_loadd(1, upper + 16, dim * 4);
    if (two) _tile_loadd(3, lower + 16, dim * 4);
    for (int part = sight.first; part < sight.end; ++part) {
      const uint16_t* from = values + (static_cast<int64_t>(part) * slabs + slab) * 512;
      _tile_loadd(4, weights + part * kPart, kKeyBlock * 2);
      _tile_loadd(6, from, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(5, weights + 16 * kKeyBlock + part * kPart, kKeyBlock * 2);
      _tile_dpbf16ps(2, 5, 6);
      if (!two) continue;
      _tile_loadd(7, from + 512, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, upper, dim * 4);
    _tile_stored(2, lower, dim * 4);
    if (two) _tile_stored(1, upper + 16, dim * 4);
    if (two) _tile_stored(3, lower + 16, dim * 4);
  }
}

constexpr float kUnseen = -1e37f;  // a logit that is not visible: finite, so that no difference is undefined
constexpr float kNone = -1e30f;    // what is below was never seen

// The largest of each of 16 vectors.
inline __m512 largest_of(const __m512* x) {
  __m512 y[8], z[4];
  for (int i = 0; i < 8; ++i)
    y[i] = _mm512_max_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(y[2 * i]), b = _mm512_castps_pd(y[2 * i + 1]);
    z[i] = _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const __m512 a = _mm512_max_ps(_mm512_shuffle_f32x4(z[0], z[1], 0x44), _mm512_shuffle_f32x4(z[0], z[1], 0xee));
  const __m512 b = _mm512_max_ps(_mm512_shuffle_f32x4(z[2], z[3], 0x44), _mm512_shuffle_f32x4(z[2], z[3], 0xee));
  return _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// The largest logits of 16 rows; those that are not visible become kUnseen.
inline __m512 mask_and_max(const Sight& sight, int first_row, float* logits) {
  __m512 most[16];
  for (int row = 0; row < 16; ++row) {
    most[row] = _mm512_set1_ps(kUnseen);
    for (int at = sight.first * kPart; at < sight.end * kPart; at += 16) {
      float* from = logits + row * kKeyBlock + at;
      __m512 x = _mm512_loadu_ps(from);
      if (!sight.whole) {
        const int low = sight.low[first_row + row] - at, high = sight.high[first_row + row] - at;
        const uint32_t before = low <= 0 ? 0 : low >= 16 ? 0xffff : (1u << low) - 1;
        const uint32_t until = high <= 0 ? 0 : high >= 16 ? 0xffff : (1u << high) - 1;
        x = _mm512_mask_blend_ps(static_cast<__mmask16>(until & ~before), _mm512_set1_ps(kUnseen), x);
        _mm512_storeu_ps(from, x);
      }
      most[row] = _mm512_max_ps(most[row], x);
    }
  }
  return largest_of(most);
}

// One block's logits to weights, the running maximum and sum.
void soften_block(const LongchatAttention& a, TileRoom& room, TileRoom::Head& head, int rows, const Sight& sight) {
  const int first = sight.first * kPart, end = sight.end * kPart;
  const __m512 factor = _mm512_set1_ps(a.softcap > 0 ? kLog2E : a.scale * kLog2E);
  if (a.softcap > 0)
    for (int row = 0; row < rows; ++row)
      for (float* at = room.logits + row * kKeyBlock + first; at < room.logits + row * kKeyBlock + end; ++at)
        *at = a.softcap * (2.0f * sigmoid(2.0f * *at * a.scale / a.softcap) - 1.0f);
  __mmask16 shrinks = 0;
  for (int half = 0; half < kRowBlock; half += 16) {
    const __m512 found = _mm512_mul_ps(mask_and_max(sight, half, room.logits + half * kKeyBlock), factor);
    const __m512 before = _mm512_loadu_ps(head.most + half), now = _mm512_max_ps(before, found);
    const __mmask16 known = _mm512_cmp_ps_mask(before, _mm512_set1_ps(kNone), _CMP_GT_OQ);
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 shrink = _mm512_mask_mov_ps(one, known, exp2_of(_mm512_maskz_sub_ps(known, before, now)));
    const __mmask16 grew = _mm512_mask_cmp_ps_mask(known, now, before, _CMP_GT_OQ);
    _mm512_storeu_ps(head.most + half, now);
    _mm512_storeu_ps(room.shrink + half, _mm512_mask_mov_ps(one, grew, shrink));
    shrinks |= grew;
  }
  for (int row = 0; row < rows; ++row) {
    const float* logits = room.logits + row * kKeyBlock;
    uint16_t* weights = room.weights + row * kKeyBlock;
    // A row that has seen nothing yet stays at nothing.
    const __m512 peak = _mm512_set1_ps(head.most[row] > kNone ? head.most[row] : 0.0f);
    __m512 sum = _mm512_mul_ps(_mm512_loadu_ps(head.total + 16 * row), _mm512_set1_ps(room.shrink[row]));
    for (int at = first; at < end; at += 32) {
      const __m512 p = exp2_of(_mm512_fmsub_ps(_mm512_loadu_ps(logits + at), factor, peak));
      const __m512 r = exp2_of(_mm512_fmsub_ps(_mm512_loadu_ps(logits + at + 16), factor, peak));
      sum = _mm512_add_ps(sum, _mm512_add_ps(p, r));
      _mm512_storeu_si512(weights + at, (__m512i)_mm512_cvtne2ps_pbh(r, p));
    }
    _mm512_storeu_ps(head.total + 16 * row, sum);
  }
  if (!shrinks) return;
  for (int row = 0; row < rows; ++row)
    for (int i = 0; i < a.dim; ++i) head.out[row * a.dim + i] *= room.shrink[row];
}

// Rows from `first` on of some heads, all of one group in every span.
void attend_block(const LongchatAttention& a, const Laid* laid, TileRoom& room, int first_head, int heads, int first,
                  int padded_dim) {
  const int rows = a.rows - first < kRowBlock ? a.rows - first : kRowBlock;
  const int64_t block_keys = static_cast<int64_t>(kKeyBlock) * padded_dim, block_values = static_cast<int64_t>(kKeyBlock) * a.dim;
  memset(room.weights, 0, sizeof(room.weights));
  for (int h = 0; h < heads; ++h) {
    TileRoom::Head& head = room.heads[h];
    memset(head.total, 0, sizeof(head.total));
    for (int row = 0; row < kRowBlock; ++row) {
      head.most[row] = a.sinks ? a.sinks[first_head + h] * kLog2E : -__builtin_inff();
      head.total[16 * row] = a.sinks ? 1.0f : 0.0f;
    }
    memset(head.out, 0, sizeof(float) * kRowBlock * a.dim);
  }
  for (int s = 0; s < a.n_spans; ++s) {
    const LongchatSpan& span = a.spans[s];
    const int group = first_head / (a.heads / span.groups);
    const auto [least, end] = seen_by(span, first, rows);
    if (least >= end) continue;
    for (int h = 0; h < heads; ++h) {
      uint16_t* to = room.heads[h].q;
      memset(to, 0, sizeof(uint16_t) * kRowBlock * padded_dim);
      for (int row = 0; row < rows; ++row, to += padded_dim) {
        const uint16_t* q = a.q + (first_head + h) * a.q_head + (first + row) * a.q_row;
        if (span.cos)
          turn(q, span, first + row, a.dim, to);
        else
          memcpy(to, q, a.dim * 2);
      }
    }
    for (int64_t at = least / kKeyBlock * kKeyBlock; at < end; at += kKeyBlock) {
      const Sight sight = sight_of(span, first, rows, at);
      if (sight.first >= sight.end) continue;
      const int64_t block = group * laid[s].blocks + (at - laid[s].first) / kKeyBlock;
      for (int h = 0; h < heads; ++h) {
        multiply_keys(room.heads[h].q, padded_dim, laid[s].keys + block * block_keys, sight, room.logits);
        soften_block(a, room, room.heads[h], rows, sight);
        multiply_values(room.weights, laid[s].values + block * block_values, a.dim, sight, room.heads[h].out);
      }
    }
  }
  for (int h = 0; h < heads; ++h)
    for (int row = 0; row < rows; ++row) {
      const TileRoom::Head& head = room.heads[h];
      const float total = _mm512_reduce_add_ps(_mm512_loadu_ps(head.total + 16 * row));
      const float inverse = total > 0 ? 1.0f / total : 0.0f;
      uint16_t* out = a.out + (first_head + h) * a.out_head + (first + row) * a.out_row;
      for (int i = 0; i < a.dim; ++i) out[i] = narrow(head.out[row * a.dim + i] * inverse);
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
  int shared = a->heads;  // heads that are of one group in every span
  for (int s = 0; s < a->n_spans; ++s) shared = a->heads / a->spans[s].groups < shared ? a->heads / a->spans[s].groups : shared;
  const int runs = (shared + kHeadsAtOnce - 1) / kHeadsAtOnce, tasks = a->heads / shared * runs;
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
    while (team.take(0, row_blocks * tasks, 1, &begin, &end)) {
      const int task = static_cast<int>(begin % tasks), done = task % runs * kHeadsAtOnce;
      const int heads = shared - done < kHeadsAtOnce ? shared - done : kHeadsAtOnce;
      attend_block(*a, laid, room, task / runs * shared + done, heads,
                   static_cast<int>(row_blocks - 1 - begin / tasks) * kRowBlock, padded_dim);
    }
    _tile_release();
  });
}

}  // namespace
