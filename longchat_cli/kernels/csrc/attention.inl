// Attention of a few query rows over spans: a thread takes some keys of one KV head for all the queries that
// share it and leaves a partial softmax; then every query's parts are joined. Parts lie at fixed places of a
// span, so that a query's result depends neither on the threads nor on the rows beside it.

namespace {

constexpr int kRun = 64;  // rows that share a list of an indexed span

struct Part {
  float most, total;  // the largest logit; the sum of e^(logit - most)
};

// Logits of one query over `n` keys, scaled.
#if defined(LONGCHAT_AVX512)
// The sums of the lanes of 16 vectors, halving what is left in each of four rounds.
inline __m512 lane_sums(const __m512 (&sums)[16]) {
  __m512 pairs[8], fours[4], eights[2];
  for (int j = 0; j < 8; ++j)
    pairs[j] = _mm512_add_ps(_mm512_unpacklo_ps(sums[2 * j], sums[2 * j + 1]),
                             _mm512_unpackhi_ps(sums[2 * j], sums[2 * j + 1]));
  for (int j = 0; j < 4; ++j) {
    const __m512d a = _mm512_castps_pd(pairs[2 * j]), b = _mm512_castps_pd(pairs[2 * j + 1]);
    fours[j] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  for (int j = 0; j < 2; ++j)
    eights[j] = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2 * j], fours[2 * j + 1], 0x88),
                              _mm512_shuffle_f32x4(fours[2 * j], fours[2 * j + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88),
                       _mm512_shuffle_f32x4(eights[0], eights[1], 0xdd));
}

template <int WHOLE, bool REST>
void logits_fixed(const uint16_t* q, const uint16_t* const* keys, int n, float scale, float* to) {
  __m512bh query[WHOLE + 1];
  for (int i = 0; i < WHOLE; ++i) query[i] = (__m512bh)_mm512_loadu_si512(q + 32 * i);
  if (REST) query[WHOLE] = (__m512bh)_mm512_maskz_loadu_epi16(0xffff, q + 32 * WHOLE);
  for (int first = 0; first < n; first += 16) {
    __m512 sums[16];
    const int some = n - first < 16 ? n - first : 16;
    for (int j = 0; j < 16; ++j) {
      const uint16_t* key = keys[first + (j < some ? j : 0)];
      sums[j] = _mm512_setzero_ps();
      for (int i = 0; i < WHOLE; ++i)
        sums[j] = _mm512_dpbf16_ps(sums[j], (__m512bh)_mm512_loadu_si512(key + 32 * i), query[i]);
      if (REST)
        sums[j] = _mm512_dpbf16_ps(sums[j], (__m512bh)_mm512_maskz_loadu_epi16(0xffff, key + 32 * WHOLE),
                                   query[WHOLE]);
    }
    const __m512 all = _mm512_mul_ps(lane_sums(sums), _mm512_set1_ps(scale));
    _mm512_mask_storeu_ps(to + first, static_cast<__mmask16>((1u << some) - 1), all);
  }
}

template <int WHOLE>
void logits_whole(const uint16_t* q, const uint16_t* const* keys, int n, int dim, float scale, float* to) {
  if (dim / 32 != WHOLE) {
    if constexpr (WHOLE < kMaxDim / 32) logits_whole<WHOLE + 1>(q, keys, n, dim, scale, to);
  } else if (dim % 32) {
    logits_fixed<WHOLE, true>(q, keys, n, scale, to);
  } else {
    logits_fixed<WHOLE, false>(q, keys, n, scale, to);
  }
}

inline void logits_of(const uint16_t* q, const uint16_t* const* keys, int n, int dim, float scale, float* to) {
  logits_whole<0>(q, keys, n, dim, scale, to);
}
#else
inline void logits_of(const uint16_t* q, const uint16_t* const* keys, int n, int dim, float scale, float* to) {
  float query[kMaxDim];
  for (int i = 0; i < dim; ++i) query[i] = widen(q[i]);
  for (int j = 0; j < n; ++j) {
    float lanes[16] = {}, sum = 0;
    for (int i = 0; i < dim; i += 16)
      for (int l = 0; l < 16; ++l) lanes[l] += query[i + l] * widen(keys[j][i + l]);
    for (int l = 0; l < 16; ++l) sum += lanes[l];
    to[j] = sum * scale;
  }
}
#endif

constexpr int kHeads = 4;  // query heads whose sums fit the registers together

// to[h dim + i] = sum over keys of weights[h][j] values[j][i], for HEADS heads. n is padded to an even number
// with weights of 0.
#if defined(LONGCHAT_AVX512)
template <int HEADS>
void weigh(const float (*weights)[kKeys + 16], const uint16_t* const* values, int n, int dim, float* to) {
  // Pairs of weights in bfloat16: one instruction multiplies two keys' values.
  uint32_t pairs[HEADS][kKeys / 2 + 8];
  for (int h = 0; h < HEADS; ++h)
    for (int j = 0; j < n; j += 32)
      _mm512_storeu_si512(pairs[h] + j / 2, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(weights[h] + j + 16),
                                                                         _mm512_loadu_ps(weights[h] + j)));
  for (int first = 0; first < dim; first += 32) {
    const __mmask32 mask = dim - first < 32 ? 0xffff : 0xffffffff;
    __m512 even[HEADS], odd[HEADS];
    for (int h = 0; h < HEADS; ++h) even[h] = odd[h] = _mm512_setzero_ps();
    for (int j = 0; j < n; j += 2) {
      const __m512i a = _mm512_maskz_loadu_epi16(mask, values[j] + first);
      const __m512i b = _mm512_maskz_loadu_epi16(mask, values[j + 1 < n ? j + 1 : j] + first);
      const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(a, b), high = (__m512bh)_mm512_unpackhi_epi16(a, b);
      for (int h = 0; h < HEADS; ++h) {
        const __m512bh both = (__m512bh)_mm512_set1_epi32(static_cast<int>(pairs[h][j / 2]));
        even[h] = _mm512_dpbf16_ps(even[h], low, both);
        odd[h] = _mm512_dpbf16_ps(odd[h], high, both);
      }
    }
    // Unpacking took four channels from each quarter in turn.
    const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i back = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int h = 0; h < HEADS; ++h) {
      _mm512_storeu_ps(to + h * dim + first, _mm512_permutex2var_ps(even[h], front, odd[h]));
      if (dim - first >= 32)
        _mm512_storeu_ps(to + h * dim + first + 16, _mm512_permutex2var_ps(even[h], back, odd[h]));
    }
  }
}
#else
template <int HEADS>
void weigh(const float (*weights)[kKeys + 16], const uint16_t* const* values, int n, int dim, float* to) {
  for (int first = 0; first < dim; first += 16) {
    float sum[HEADS][16] = {};
    for (int j = 0; j < n; ++j) {
      float value[16];
      for (int i = 0; i < 16; ++i) value[i] = widen(values[j][first + i]);
      for (int h = 0; h < HEADS; ++h)
        for (int i = 0; i < 16; ++i) sum[h][i] += weights[h][j] * value[i];
    }
    for (int h = 0; h < HEADS; ++h) __builtin_memcpy(to + h * dim + first, sum[h], 64);
  }
}
#endif

using Weigh = void (*)(const float (*)[kKeys + 16], const uint16_t* const*, int, int, float*);
constexpr Weigh kWeigh[kHeads] = {weigh<1>, weigh<2>, weigh<3>, weigh<4>};

// Logits to e^(logit - most) in place, with zeros behind them.
inline Part soften(float* weights, int n) {
  float most[16], lanes[16] = {}, largest = -__builtin_inff(), total = 0;
  for (int j = n; j < (n + 31) / 32 * 32; ++j) weights[j] = -__builtin_inff();
  for (int l = 0; l < 16; ++l) most[l] = -__builtin_inff();
  for (int j = 0; j < n; j += 16)
    for (int l = 0; l < 16; ++l) most[l] = weights[j + l] > most[l] ? weights[j + l] : most[l];
  for (int l = 0; l < 16; ++l) largest = most[l] > largest ? most[l] : largest;
  for (int j = 0; j < (n + 31) / 32 * 32; j += 16)
    for (int l = 0; l < 16; ++l) {
      weights[j + l] = exponential(weights[j + l] - largest);
      lanes[l] += weights[j + l];
    }
  for (int l = 0; l < 16; ++l) total += lanes[l];
  return {largest, total};
}

inline int64_t places_of(const LongchatSpan& s) { return s.index ? s.listed : s.keys; }
inline int64_t chunks_of(const LongchatSpan& s) { return (places_of(s) + kKeys - 1) / kKeys; }

// Where the logits of an observed row begin: those of the rows that are looked at are kept.
inline int64_t logits_at(const LongchatSpan& s, int rows, int64_t head, int64_t row) {
  return (s.observe_rows ? head * rows + row : head) * s.keys;
}

// One attention call: planned and given its memory by one thread, then run by all of a team.
class Attention {
 public:
  Attention() = default;
  explicit Attention(const LongchatAttention& call) : a(call), queries(call.heads * call.rows) {
    for (int s = 0; s < a.n_spans; ++s) {
      const LongchatSpan& span = a.spans[s];
      first_item[s] = items;
      first_chunk[s] = chunks;
      first_logit[s] = logits;
      items += span.groups * chunks_of(span);
      chunks += chunks_of(span);
      if (span.observe) logits += logits_at(span, a.rows, a.heads, 0);
    }
  }

  int64_t bytes() const {
    const int64_t parts = chunks * queries;
    return parts * (sizeof(Part) + a.dim * 4) + logits * 4 + queries * (8 + a.n_spans * a.dim * 2) + 5 * 64;
  }

  void prepare(Scratch& memory) {
    const int64_t parts = chunks * queries;
    part = memory.take<Part>(parts);
    sums = memory.take<float>(parts * a.dim);
    kept = memory.take<float>(logits);
    lse = memory.take<float>(queries);
    turned = memory.take<uint16_t>(static_cast<int64_t>(a.n_spans) * queries * a.dim);
    for (int s = 0; s < a.n_spans; ++s)
      for (int head = 0; a.spans[s].cos && head < a.heads; ++head)
        for (int row = 0; row < a.rows; ++row)
          turn(a.q + head * a.q_head + row * a.q_row, a.spans[s], row, a.dim, turned_at(s, head, row));
  }

  void run(Team& team) {
    int64_t begin, end;
    while (team.take(0, items, 1, &begin, &end)) weigh_keys(begin);
    team.barrier();
    while (team.take(0, queries, 1, &begin, &end)) merge(begin);
    if (!logits) return;
    team.barrier();
    for (int s = 0; s < a.n_spans; ++s) {
      const LongchatSpan& span = a.spans[s];
      if (!span.observe) continue;
      while (team.take(s, span.observe_groups * chunks_of(span), 1, &begin, &end)) {
        const int64_t group = begin / chunks_of(span), low = begin % chunks_of(span) * kKeys;
        observe(span, kept + first_logit[s], group, low, low + kKeys < span.keys ? low + kKeys : span.keys);
      }
    }
  }

 private:
  uint16_t* turned_at(int s, int64_t head, int row) const {
    return turned + ((s * a.heads + head) * a.rows + row) * a.dim;
  }
  const uint16_t* query_of(int s, int64_t head, int row) const {
    return a.spans[s].cos ? turned_at(s, head, row) : a.q + head * a.q_head + row * a.q_row;
  }

  // Some keys of a KV head: every row's and head's partial softmax over them.
  void weigh_keys(int64_t item) {
    int s = a.n_spans - 1;
    while (first_item[s] > item) --s;
    const LongchatSpan& span = a.spans[s];
    const int64_t n_chunks = chunks_of(span), group = (item - first_item[s]) / n_chunks;
    const int64_t chunk = (item - first_item[s]) % n_chunks, low = chunk * kKeys;
    const int64_t high = low + kKeys < places_of(span) ? low + kKeys : places_of(span);
    const int share = a.heads / span.groups;
    for (int row = 0; row < a.rows; ++row) {
      const int64_t start = span.start[row] > 0 ? span.start[row] : 0;
      const int64_t stop = span.stop[row] < span.keys ? span.stop[row] : span.keys;
      const uint16_t *keys[kKeys], *values[kKeys];
      int64_t at[kKeys];
      int n = 0;
      if (span.index) {
        const int64_t* list = span.index + group * span.index_group + row / kRun * span.index_run;
        for (int64_t j = low; j < high; ++j)
          if (list[j] >= start && list[j] < stop) at[n++] = list[j];
      } else {
        for (int64_t j = low > start ? low : start; j < high && j < stop; ++j) at[n++] = j;
      }
      for (int j = 0; j < n; ++j) {
        keys[j] = span.k + group * span.k_head + at[j] * span.k_key;
        values[j] = span.v + group * span.v_head + at[j] * span.v_key;
      }
      // The processor foresees no page's beginning and no list's order.
      for (int j = 0; j < n; ++j)
        for (int i = 0; i < a.dim; i += 32) {
          __builtin_prefetch(keys[j] + i);
          __builtin_prefetch(values[j] + i, 0, 2);
        }
      for (int first = 0; first < share; first += kHeads) {
        const int some = share - first < kHeads ? share - first : kHeads;
        alignas(64) float weights[kHeads][kKeys + 16];
        alignas(64) float found[kHeads * kMaxDim];
        for (int h = 0; h < some; ++h) {
          const int64_t head = group * share + first + h, query = head * a.rows + row;
          float* mine = weights[h];
          if (n) logits_of(query_of(s, head, row), keys, n, a.dim, a.scale, mine);
          if (a.softcap > 0)
            for (int j = 0; j < n; ++j) mine[j] = a.softcap * (2.0f * sigmoid(2.0f * mine[j] / a.softcap) - 1.0f);
          if (span.observe && (span.observe_rows || row == a.rows - 1)) {
            float* logit = kept + first_logit[s] + logits_at(span, a.rows, head, row);
            for (int64_t j = low; j < high; ++j) logit[j] = -__builtin_inff();
            for (int j = 0; j < n; ++j) logit[at[j]] = mine[j];
          }
          part[query * chunks + first_chunk[s] + chunk] = n ? soften(mine, n) : Part{-__builtin_inff(), 0};
        }
        if (!n) continue;
        kWeigh[some - 1](weights, values, n, a.dim, found);
        for (int h = 0; h < some; ++h) {
          const int64_t query = (group * share + first + h) * a.rows + row;
          __builtin_memcpy(sums + (query * chunks + first_chunk[s] + chunk) * a.dim, found + h * a.dim, a.dim * 4);
        }
      }
    }
  }

  void merge(int64_t query) {
    const int64_t head = query / a.rows, row = query % a.rows;
    float most = a.sinks ? a.sinks[head] : -__builtin_inff();
    const Part* mine = part + query * chunks;
    for (int64_t c = 0; c < chunks; ++c) most = mine[c].most > most ? mine[c].most : most;
    float total = a.sinks ? exponential(a.sinks[head] - most) : 0, sum[kMaxDim] = {};
    for (int64_t c = 0; c < chunks; ++c) {
      if (mine[c].total == 0) continue;
      const float weight = exponential(mine[c].most - most);
      const float* from = sums + (query * chunks + c) * a.dim;
      total += weight * mine[c].total;
      for (int i = 0; i < a.dim; ++i) sum[i] += weight * from[i];
    }
    lse[query] = total > 0 ? most + __builtin_logf(total) : 0.0f;  // a row that sees nothing scores nothing
    const float inverse = total > 0 ? 1.0f / total : 0.0f;
    uint16_t* out = a.out + head * a.out_head + row * a.out_row;
    for (int i = 0; i < a.dim; ++i) out[i] = narrow(sum[i] * inverse);
  }

  // The probabilities of keys low to high for a group of heads, from their logits.
  void observe(const LongchatSpan& span, const float* logit, int64_t group, int64_t low, int64_t high) {
    const int share = a.heads / span.observe_groups, n = static_cast<int>(high - low);
    float found[kKeys] = {};
    for (int h = 0; h < share; ++h) {
      const int64_t head = group * share + h;
      float p[kKeys] = {};
      for (int row = span.observe_rows ? 0 : a.rows - 1; row < a.rows; ++row) {
        const float *from = logit + logits_at(span, a.rows, head, row) + low, whole = lse[head * a.rows + row];
        for (int j = 0; j < n; ++j) p[j] += exponential(from[j] - whole);
      }
      for (int j = 0; j < n; ++j) found[j] = span.observe == 1 ? (p[j] > found[j] ? p[j] : found[j]) : found[j] + p[j];
    }
    float* to = span.observed + group * span.keys + low;
    for (int j = 0; j < n; ++j) to[j] = span.observe == 2 ? found[j] / share : found[j];
  }

  LongchatAttention a{};
  int queries = 0;
  int64_t items = 0, chunks = 0, logits = 0;
  int64_t first_item[16] = {}, first_chunk[16] = {}, first_logit[16] = {};
  Part* part = nullptr;
  float *sums = nullptr, *kept = nullptr, *lse = nullptr;
  uint16_t* turned = nullptr;
};

void attend(const LongchatAttention* a) {
  Attention attention(*a);
  scratch.reset(attention.bytes());
  attention.prepare(scratch);
  parallel(a->threads, [&](Team& team, int) { attention.run(team); });
}

// A few tokens through all layers: what enter, attend, leave and linear do, and in the same places.
void step(const LongchatStep* s) {
  const LongchatModel& m = *s->model;
  const int rows = s->rows;
  const int64_t head = static_cast<int64_t>(rows) * m.dim, width = m.width;
  uint16_t* out = nullptr;
  auto attention_of = [&](int index) {
    const LongchatLayer& layer = s->layers[index];
    return Attention({layer.spans, s->q + index * m.heads * head, head, m.dim, nullptr, out, head, m.dim,
                      layer.n_spans, m.heads, rows, m.dim, m.threads, s->scale, 0.0f});
  };
  int64_t most = 0;
  for (int index = 0; index < s->n_layers; ++index) {
    const int64_t bytes = attention_of(index).bytes();
    most = bytes > most ? bytes : most;
  }
  scratch.reset(Room::bytes(m, rows) + m.heads * head * 2 + most);
  Scratch& memory = scratch;
  out = memory.take<uint16_t>(m.heads * head);
  Room room(m, rows, memory);
  const int64_t used = memory.used();
  const LongchatLinear last[1] = {*s->head};
  Attention attention;
  parallel(m.threads, [&](Team& team, int thread) {
    for (int index = 0; index < s->n_layers; ++index) {
      const LongchatBlock& block = s->blocks[index];
      const LongchatLayer& layer = s->layers[index];
      if (thread == 0) memory.release(used);
      project(m, block, s->x, rows, room, team, thread);
      if (thread == 0) {
        place(m, block, rows, room, {layer.cos, layer.sin, layer.planes, s->q + index * m.heads * head,
              layer.k[0], layer.v[0], head, layer.k_head[0], layer.v_head[0]});
        for (int h = 0; layer.k[1] && h < m.kv_heads; ++h) {
          __builtin_memcpy(layer.k[1] + h * layer.k_head[1], layer.k[0] + h * layer.k_head[0], head * 2);
          __builtin_memcpy(layer.v[1] + h * layer.v_head[1], layer.v[0] + h * layer.v_head[0], head * 2);
        }
        attention = attention_of(index);
        attention.prepare(memory);
      }
      team.barrier();
      attention.run(team);
      team.barrier();
      finish(m, block, s->x, rows, out, head, m.dim, room, team, thread);
    }
    if (thread == 0) {
      memory.release(used);
      for (int r = 0; r < rows; ++r) norm(s->x + r * width, s->norm, room.normed + r * width, m.width, m.eps);
      room.input = quantized_input(last, room.normed, rows, memory);
    }
    team.barrier();
    multiply(last, room.input, s->logits, rows, team);
  });
}

}  // namespace
