// Attention of a few query rows over spans: a thread takes some keys of one KV head for all the queries that
// share it and leaves a partial softmax; then every query's parts are joined. Parts lie at fixed places of a
// span, so that a query's result depends neither on the threads nor on the rows beside it.

namespace {

constexpr int kRun = 64;  // rows that share a list of an indexed span

struct Part {
  float most, total;  // the largest logit; the sum of e^(logit - most)
};

// Some keys of a span, and their values: one after another, or listed. What comes next is asked for while one
// computes, evenly: values while keys are multiplied, the next keys while values are. The processor foresees no
// page's beginning and no list's order, and takes few requests at a time.
constexpr int kSoon = 16;  // keys ahead

template <int LEVEL>
inline void ask(const uint16_t* at, int dim) {
  for (int i = 0; i < dim; i += 32) __builtin_prefetch(at + i, 0, LEVEL);
}

struct Strided {
  const uint16_t *keys, *values;
  int64_t key_step, value_step;
  const uint16_t* key(int j) const { return keys + j * key_step; }
  const uint16_t* value(int j) const { return values + j * value_step; }
  void ask_key(int j, int dim) const { ask<3>(key(j), dim); }
  void ask_value(int j, int dim) const { ask<2>(value(j), dim); }
  void ask_next(int j, int dim) const { ask<2>(key(kKeys + j), dim); }
};

struct Listed {
  int count;
  const uint16_t *keys[kKeys], *values[kKeys];
  const uint16_t* key(int j) const { return keys[j]; }
  const uint16_t* value(int j) const { return values[j]; }
  void ask_key(int j, int dim) const {
    if (j < count) ask<3>(keys[j], dim);
  }
  void ask_value(int j, int dim) const {
    if (j < count) ask<2>(values[j], dim);
  }
  void ask_next(int, int) const {}
};

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

template <int WHOLE, bool REST, typename Keys>
void logits_fixed(const uint16_t* const* q, int heads, const Keys& keys, int n, float scale, float (*to)[kKeys + 16]) {
  constexpr int kDim = 32 * WHOLE + (REST ? 16 : 0);
  for (int first = 0; first < n; first += 16) {
    const int some = n - first < 16 ? n - first : 16;
    const uint16_t* rows[16];
    for (int j = 0; j < 16; ++j) rows[j] = keys.key(first + (j < some ? j : 0));
    for (int h = 0; h < heads; ++h) {
      __m512bh query[WHOLE + 1];
      for (int i = 0; i < WHOLE; ++i) query[i] = (__m512bh)_mm512_loadu_si512(q[h] + 32 * i);
      if (REST) query[WHOLE] = (__m512bh)_mm512_maskz_loadu_epi16(0xffff, q[h] + 32 * WHOLE);
      __m512 sums[16];
      for (int j = 0; j < 16; ++j) {
        sums[j] = _mm512_setzero_ps();
        if (h == 0) keys.ask_key(first + j + kSoon, kDim);
        if (h == heads - 1) keys.ask_value(first + j, kDim);
        for (int i = 0; i < WHOLE; ++i)
          sums[j] = _mm512_dpbf16_ps(sums[j], (__m512bh)_mm512_loadu_si512(rows[j] + 32 * i), query[i]);
        if (REST)
          sums[j] = _mm512_dpbf16_ps(sums[j], (__m512bh)_mm512_maskz_loadu_epi16(0xffff, rows[j] + 32 * WHOLE),
                                     query[WHOLE]);
      }
      _mm512_storeu_ps(to[h] + first, _mm512_mul_ps(lane_sums(sums), _mm512_set1_ps(scale)));
    }
  }
}

template <int WHOLE, typename Keys>
void logits_whole(const uint16_t* const* q, int heads, const Keys& keys, int n, int dim, float scale,
                  float (*to)[kKeys + 16]) {
  if (dim / 32 != WHOLE) {
    if constexpr (WHOLE < kMaxDim / 32) logits_whole<WHOLE + 1>(q, heads, keys, n, dim, scale, to);
  } else if (dim % 32) {
    logits_fixed<WHOLE, true>(q, heads, keys, n, scale, to);
  } else {
    logits_fixed<WHOLE, false>(q, heads, keys, n, scale, to);
  }
}

// to[h] = the logits of a query of each head.
template <typename Keys>
void logits_of(const uint16_t* const* q, int heads, const Keys& keys, int n, int dim, float scale,
               float (*to)[kKeys + 16]) {
  logits_whole<0>(q, heads, keys, n, dim, scale, to);
}
#else
template <typename Keys>
void logits_of(const uint16_t* const* q, int heads, const Keys& keys, int n, int dim, float scale,
               float (*to)[kKeys + 16]) {
  for (int h = 0; h < heads; ++h) {
    float query[kMaxDim];
    for (int i = 0; i < dim; ++i) query[i] = widen(q[h][i]);
    for (int j = 0; j < n; ++j) {
      if (h == 0) keys.ask_key(j + kSoon, dim);
      if (h == 0) keys.ask_value(j, dim);
      const uint16_t* key = keys.key(j);
      float lanes[16] = {}, sum = 0;
      for (int i = 0; i < dim; i += 16)
        for (int l = 0; l < 16; ++l) lanes[l] += query[i + l] * widen(key[i + l]);
      for (int l = 0; l < 16; ++l) sum += lanes[l];
      to[h][j] = sum * scale;
    }
  }
}
#endif

constexpr int kHeads = 4;  // query heads whose sums fit the registers together

// to[h dim + i] = sum over keys of weights[h][j] value(j)[i], for HEADS heads. n is padded to an even number
// with weights of 0.
#if defined(LONGCHAT_AVX512)
// PARTS 32 channels each, from `first` on; the last of them perhaps half of that.
template <int HEADS, int PARTS, typename Keys>
void weigh_parts(const uint32_t (*pairs)[kKeys / 2 + 8], const Keys& keys, int n, int dim, int first, float* to) {
  const __mmask32 mask = dim - first < 32 * PARTS ? 0xffff : 0xffffffff;
  __m512 even[HEADS][PARTS], odd[HEADS][PARTS];
  for (int h = 0; h < HEADS; ++h)
    for (int p = 0; p < PARTS; ++p) even[h][p] = odd[h][p] = _mm512_setzero_ps();
  for (int j = 0; j < n; j += 2) {
    const uint16_t *one = keys.value(j) + first, *other = keys.value(j + 1 < n ? j + 1 : j) + first;
    __m512bh low[PARTS], high[PARTS];
    for (int p = 0; p < PARTS; ++p) {
      const bool last = p == PARTS - 1;
      const __m512i a = last ? _mm512_maskz_loadu_epi16(mask, one + 32 * p) : _mm512_loadu_si512(one + 32 * p);
      const __m512i b = last ? _mm512_maskz_loadu_epi16(mask, other + 32 * p) : _mm512_loadu_si512(other + 32 * p);
      low[p] = (__m512bh)_mm512_unpacklo_epi16(a, b);
      high[p] = (__m512bh)_mm512_unpackhi_epi16(a, b);
    }
    keys.ask_next(j, dim);
    keys.ask_next(j + 1, dim);
    for (int h = 0; h < HEADS; ++h) {
      const __m512bh both = (__m512bh)_mm512_set1_epi32(static_cast<int>(pairs[h][j / 2]));
      for (int p = 0; p < PARTS; ++p) {
        even[h][p] = _mm512_dpbf16_ps(even[h][p], low[p], both);
        odd[h][p] = _mm512_dpbf16_ps(odd[h][p], high[p], both);
      }
    }
  }
  // Unpacking took four channels from each quarter in turn.
  const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i back = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int h = 0; h < HEADS; ++h)
    for (int p = 0; p < PARTS; ++p) {
      float* at = to + h * dim + first + 32 * p;
      _mm512_storeu_ps(at, _mm512_permutex2var_ps(even[h][p], front, odd[h][p]));
      if (dim - first - 32 * p >= 32) _mm512_storeu_ps(at + 16, _mm512_permutex2var_ps(even[h][p], back, odd[h][p]));
    }
}

template <int HEADS, typename Keys>
void weigh_some(const float (*weights)[kKeys + 16], const Keys& keys, int n, int dim, float* to) {
  // Pairs of weights in bfloat16: one instruction multiplies two keys' values.
  uint32_t pairs[HEADS][kKeys / 2 + 8];
  for (int h = 0; h < HEADS; ++h)
    for (int j = 0; j < n; j += 32)
      _mm512_storeu_si512(pairs[h] + j / 2, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(weights[h] + j + 16),
                                                                         _mm512_loadu_ps(weights[h] + j)));
  int first = 0;
  for (; first + 32 < dim; first += 64) weigh_parts<HEADS, 2>(pairs, keys, n, dim, first, to);
  if (first < dim) weigh_parts<HEADS, 1>(pairs, keys, n, dim, first, to);
}
#else
template <int HEADS, typename Keys>
void weigh_some(const float (*weights)[kKeys + 16], const Keys& keys, int n, int dim, float* to) {
  for (int first = 0; first < dim; first += 16) {
    float sum[HEADS][16] = {};
    for (int j = 0; j < n; ++j) {
      const uint16_t* from = keys.value(j) + first;
      float value[16];
      for (int i = 0; i < 16; ++i) value[i] = widen(from[i]);
      for (int h = 0; h < HEADS; ++h)
        for (int i = 0; i < 16; ++i) sum[h][i] += weights[h][j] * value[i];
    }
    for (int h = 0; h < HEADS; ++h) __builtin_memcpy(to + h * dim + first, sum[h], 64);
  }
}
#endif

template <typename Keys>
void weigh(int heads, const float (*weights)[kKeys + 16], const Keys& keys, int n, int dim, float* to) {
  switch (heads) {
    case 1: return weigh_some<1>(weights, keys, n, dim, to);
    case 2: return weigh_some<2>(weights, keys, n, dim, to);
    case 3: return weigh_some<3>(weights, keys, n, dim, to);
    default: return weigh_some<4>(weights, keys, n, dim, to);
  }
}

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
    const int64_t share = items / (team.size() * 4), step = share < 1 ? 1 : share > 8 ? 8 : share;
    while (team.take(0, items, step, &begin, &end))
      for (int64_t item = begin; item < end; ++item) weigh_keys(item);
    meet(team);
    while (team.take(0, queries, 1, &begin, &end)) merge(begin);
    if (logits) {
      meet(team);
      observe_all(team);
    }
    meet(team);
  }

 private:
  static void meet(Team& team) {
    watch.lap(Phase::attention);
    team.barrier();
    watch.lap(Phase::waiting);
  }

  void observe_all(Team& team) {
    int64_t begin, end;
    for (int s = 0; s < a.n_spans; ++s) {
      const LongchatSpan& span = a.spans[s];
      if (!span.observe) continue;
      while (team.take(s, span.observe_groups * chunks_of(span), 1, &begin, &end)) {
        const int64_t group = begin / chunks_of(span), low = begin % chunks_of(span) * kKeys;
        observe(span, kept + first_logit[s], group, low, low + kKeys < span.keys ? low + kKeys : span.keys);
      }
    }
  }

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
      const uint16_t *k = span.k + group * span.k_head, *v = span.v + group * span.v_head;
      const int64_t at_chunk = first_chunk[s] + chunk;
      if (span.index) {
        const int64_t* list = span.index + group * span.index_group + row / kRun * span.index_run;
        Listed keys;
        int64_t at[kKeys];
        int n = 0;
        for (int64_t j = low; j < high; ++j)
          if (list[j] >= start && list[j] < stop) at[n++] = list[j];
        keys.count = n;
        for (int j = 0; j < n; ++j) {
          keys.keys[j] = k + at[j] * span.k_key;
          keys.values[j] = v + at[j] * span.v_key;
        }
        weigh_row(s, group * share, share, row, at_chunk, keys, n, nullptr);
      } else {
        const int64_t from = low > start ? low : start, to = high < stop ? high : stop;
        const int n = static_cast<int>(to > from ? to - from : 0);
        const Strided keys{k + from * span.k_key, v + from * span.v_key, span.k_key, span.v_key};
        const Place seen{low, high, from};
        weigh_row(s, group * share, share, row, at_chunk, keys, n, span.observe && (span.observe_rows || row == a.rows - 1) ? &seen : nullptr);
      }
    }
  }

  // Where the keys that a row sees of a chunk lie in their span.
  struct Place {
    int64_t low, high, from;
  };

  // A row's partial softmax over n keys, for the heads from `head` on that share them.
  template <typename Keys>
  void weigh_row(int s, int64_t head, int share, int row, int64_t chunk, const Keys& keys, int n, const Place* seen) {
    for (int first = 0; first < share; first += kHeads) {
      const int some = share - first < kHeads ? share - first : kHeads;
      alignas(64) float weights[kHeads][kKeys + 16];
      alignas(64) float found[kHeads * kMaxDim];
      const uint16_t* q[kHeads];
      for (int h = 0; h < some; ++h) q[h] = query_of(s, head + first + h, row);
      if (n) logits_of(q, some, keys, n, a.dim, a.scale, weights);
      for (int h = 0; h < some; ++h) {
        float* mine = weights[h];
        if (a.softcap > 0)
          for (int j = 0; j < n; ++j) mine[j] = a.softcap * (2.0f * sigmoid(2.0f * mine[j] / a.softcap) - 1.0f);
        if (seen) {
          float* logit = kept + first_logit[s] + logits_at(a.spans[s], a.rows, head + first + h, row);
          for (int64_t j = seen->low; j < seen->high; ++j) logit[j] = -__builtin_inff();
          __builtin_memcpy(logit + seen->from, mine, n * 4);
        }
        part[((head + first + h) * a.rows + row) * chunks + chunk] = n ? soften(mine, n) : Part{-__builtin_inff(), 0};
      }
      if (!n) continue;
      weigh(some, weights, keys, n, a.dim, found);
      for (int h = 0; h < some; ++h)
        __builtin_memcpy(sums + (((head + first + h) * a.rows + row) * chunks + chunk) * a.dim, found + h * a.dim,
                         a.dim * 4);
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
  const int64_t head = static_cast<int64_t>(rows) * m.dim;
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
  Room room(m, rows, s->x, memory);
  const int64_t used = memory.used();
  const LongchatLinear last[1] = {s->head->upper};
  Attention attention;
  parallel(m.threads, [&](Team& team, int thread) {
    if (thread == 0) watch.start(s->spent);
    for (int index = 0; index < s->n_layers; ++index) {
      const LongchatBlock& block = s->blocks[index];
      const LongchatLayer& layer = s->layers[index];
      if (thread == 0) memory.release(used);
      project(m, block, rows, room, team, thread);
      if (thread == 0) {
        place(m, block, rows, room, {layer.cos, layer.sin, layer.planes, s->q + index * m.heads * head,
              layer.k[0], layer.v[0], head, layer.k_head[0], layer.v_head[0]});
        for (int h = 0; layer.k[1] && h < m.kv_heads; ++h) {
          __builtin_memcpy(layer.k[1] + h * layer.k_head[1], layer.k[0] + h * layer.k_head[0], head * 2);
          __builtin_memcpy(layer.v[1] + h * layer.v_head[1], layer.v[0] + h * layer.v_head[0], head * 2);
        }
        attention = attention_of(index);
        attention.prepare(memory);
        watch.lap(Phase::rotation);
      }
      team.barrier();
      watch.lap(Phase::waiting);
      attention.run(team);
      finish(m, block, rows, out, head, m.dim, room, team, thread);
    }
    Own& own = room.own[thread];
    own.prepare_normed(last, s->norm, m.eps, rows);
    watch.lap(Phase::inputs);
    last_product(*s->head, own.input, s->logits, rows, team);
    watch.lap(Phase::last);
    if (thread == 0) watch.start(nullptr);
  });
}

}  // namespace
