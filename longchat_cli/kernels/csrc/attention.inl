// Attention of a few query rows over spans: a thread takes some keys of one KV head for all the queries that
// share it and leaves a partial softmax; then every query's parts are joined. Parts lie at fixed places of a
// span, so that a query's result depends neither on the threads nor on the rows beside it.

namespace {

constexpr int kRun = 64;  // rows that share a list of an indexed span

struct Part {
  float most, total;  // the largest logit; the sum of e^(logit - most)
};

// Logits of one query over `n` keys, scaled.
inline void logits_of(const uint16_t* q, const uint16_t* const* keys, int n, int dim, float scale, float* to) {
#if defined(LONGCHAT_AVX512)
  const int whole = dim / 32;
  for (int first = 0; first < n; first += 16) {
    __m512 sums[16];
    const int some = n - first < 16 ? n - first : 16;
    for (int j = 0; j < 16; ++j) {
      const uint16_t* key = keys[first + (j < some ? j : 0)];
      __m512 sum = _mm512_setzero_ps();
      for (int i = 0; i < whole; ++i)
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(key + 32 * i),
                               (__m512bh)_mm512_loadu_si512(q + 32 * i));
      if (dim % 32)
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_maskz_loadu_epi16(0xffff, key + 32 * whole),
                               (__m512bh)_mm512_maskz_loadu_epi16(0xffff, q + 32 * whole));
      sums[j] = sum;
    }
    // Add the lanes of 16 vectors at once, halving what is left in each of four rounds.
    __m512 pairs[8], fours[4], eights[2];
    for (int j = 0; j < 8; ++j)
      pairs[j] = _mm512_add_ps(_mm512_unpacklo_ps(sums[2 * j], sums[2 * j + 1]),
                               _mm512_unpackhi_ps(sums[2 * j], sums[2 * j + 1]));
    for (int j = 0; j < 4; ++j)
      fours[j] = _mm512_add_ps(
          _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(pairs[2 * j]), _mm512_castps_pd(pairs[2 * j + 1]))),
          _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(pairs[2 * j]), _mm512_castps_pd(pairs[2 * j + 1]))));
    for (int j = 0; j < 2; ++j)
      eights[j] = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2 * j], fours[2 * j + 1], 0x88),
                                _mm512_shuffle_f32x4(fours[2 * j], fours[2 * j + 1], 0xdd));
    __m512 all = _mm512_add_ps(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88),
                               _mm512_shuffle_f32x4(eights[0], eights[1], 0xdd));
    all = _mm512_mul_ps(all, _mm512_set1_ps(scale));
    _mm512_mask_storeu_ps(to + first, static_cast<__mmask16>((1u << some) - 1), all);
  }
#else
  float query[kMaxDim];
  for (int i = 0; i < dim; ++i) query[i] = widen(q[i]);
  for (int j = 0; j < n; ++j) {
    float lanes[16] = {}, sum = 0;
    for (int i = 0; i < dim; i += 16)
      for (int l = 0; l < 16; ++l) lanes[l] += query[i + l] * widen(keys[j][i + l]);
    for (int l = 0; l < 16; ++l) sum += lanes[l];
    to[j] = sum * scale;
  }
#endif
}

// to[i] = sum over keys of weights[j] values[j][i].
template <int DIM>
inline void weigh_fixed(const float* weights, const uint16_t* const* values, int n, int dim, float* to) {
  // So many sums fit registers.
  for (int first = 0; first < dim; first += DIM) {
    float sum[DIM] = {};
    for (int j = 0; j < n; ++j) {
      const float w = weights[j];
      const uint16_t* v = values[j] + first;
      for (int i = 0; i < DIM; ++i) sum[i] += w * widen(v[i]);
    }
    for (int i = 0; i < DIM; ++i) to[first + i] = sum[i];
  }
}

inline void weigh(const float* weights, const uint16_t* const* values, int n, int dim, float* to) {
  if (dim % 64 == 0)
    weigh_fixed<64>(weights, values, n, dim, to);
  else
    weigh_fixed<16>(weights, values, n, dim, to);
}

inline int64_t places_of(const LongchatSpan& s) { return s.index ? s.listed : s.keys; }
inline int64_t chunks_of(const LongchatSpan& s) { return (places_of(s) + kKeys - 1) / kKeys; }

void attend(const LongchatAttention* a) {
  const int queries = a->heads * a->rows;
  int64_t items = 0, chunks = 0, logits = 0;
  int64_t first_item[16], first_chunk[16], first_logit[16];
  for (int s = 0; s < a->n_spans; ++s) {
    const LongchatSpan& span = a->spans[s];
    first_item[s] = items;
    first_chunk[s] = chunks;
    first_logit[s] = logits;
    items += span.groups * chunks_of(span);
    chunks += chunks_of(span);
    if (span.observe) logits += span.keys * queries;
  }
  const int64_t parts = chunks * queries;
  scratch.reset(parts * (sizeof(Part) + a->dim * 4) + logits * 4 + queries * 8 + 256);
  Part* part = scratch.take<Part>(parts);
  float* sums = scratch.take<float>(parts * a->dim);
  float* kept = scratch.take<float>(logits);
  float* lse = scratch.take<float>(queries);

  auto one = [&](int64_t item) {
    int s = a->n_spans - 1;
    while (first_item[s] > item) --s;
    const LongchatSpan& span = a->spans[s];
    const int64_t n_chunks = chunks_of(span), group = (item - first_item[s]) / n_chunks;
    const int64_t chunk = (item - first_item[s]) % n_chunks, low = chunk * kKeys;
    const int64_t high = low + kKeys < places_of(span) ? low + kKeys : places_of(span);
    const int share = a->heads / span.groups;
    for (int row = 0; row < a->rows; ++row) {
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
      for (int h = 0; h < share; ++h) {
        const int64_t head = group * share + h, query = head * a->rows + row;
        const int64_t place = query * chunks + first_chunk[s] + chunk;
        float weights[kKeys + 16];
        if (n) logits_of(span.q + head * span.q_head + row * span.q_row, keys, n, a->dim, a->scale, weights);
        if (a->softcap > 0)
          for (int j = 0; j < n; ++j)
            weights[j] = a->softcap * (2.0f * sigmoid(2.0f * weights[j] / a->softcap) - 1.0f);
        if (span.observe && (span.observe_rows || row == a->rows - 1)) {
          float* logit = kept + first_logit[s] + query * span.keys;
          for (int64_t j = low; j < high; ++j) logit[j] = -__builtin_inff();
          for (int j = 0; j < n; ++j) logit[at[j]] = weights[j];
        }
        float most = -__builtin_inff(), lanes[16] = {};
        for (int j = 0; j < n; ++j) most = weights[j] > most ? weights[j] : most;
        for (int j = n; j < n + 15; ++j) weights[j] = -__builtin_inff();
        for (int j = 0; j < n; j += 16)
          for (int l = 0; l < 16; ++l) {
            weights[j + l] = exponential(weights[j + l] - most);
            lanes[l] += weights[j + l];
          }
        float total = 0;
        for (int l = 0; l < 16; ++l) total += lanes[l];
        part[place] = {most, total};
        if (n) weigh(weights, values, n, a->dim, sums + place * a->dim);
      }
    }
  };

  auto merge = [&](int64_t query) {
    const int64_t head = query / a->rows, row = query % a->rows;
    float most = a->sinks ? a->sinks[head] : -__builtin_inff();
    const Part* mine = part + query * chunks;
    for (int64_t c = 0; c < chunks; ++c) most = mine[c].most > most ? mine[c].most : most;
    float total = a->sinks ? exponential(a->sinks[head] - most) : 0, sum[kMaxDim] = {};
    for (int64_t c = 0; c < chunks; ++c) {
      if (mine[c].total == 0) continue;
      const float weight = exponential(mine[c].most - most);
      const float* from = sums + (query * chunks + c) * a->dim;
      total += weight * mine[c].total;
      for (int i = 0; i < a->dim; ++i) sum[i] += weight * from[i];
    }
    lse[query] = most + __builtin_logf(total);
    const float inverse = total > 0 ? 1.0f / total : 0.0f;
    uint16_t* out = a->out + head * a->out_head + row * a->out_row;
    for (int i = 0; i < a->dim; ++i) out[i] = narrow(sum[i] * inverse);
  };

  auto observe = [&](const LongchatSpan& span, const float* logit, int64_t group, int64_t low, int64_t high) {
    const int share = a->heads / span.observe_groups;
    for (int64_t j = low; j < high; ++j) {
      float found = 0;
      for (int h = 0; h < share; ++h) {
        float p = 0;
        for (int row = span.observe_rows ? 0 : a->rows - 1; row < a->rows; ++row) {
          const int64_t query = (group * share + h) * a->rows + row;
          p += exponential(logit[query * span.keys + j] - lse[query]);
        }
        found = span.observe == 1 ? (p > found ? p : found) : found + p;
      }
      span.observed[group * span.keys + j] = span.observe == 2 ? found / share : found;
    }
  };

  parallel(a->threads, [&](Team& team, int) {
    int64_t begin, end;
    while (team.take(0, items, 1, &begin, &end)) one(begin);
    team.barrier();
    while (team.take(1, queries, 1, &begin, &end)) merge(begin);
    if (!logits) return;
    team.barrier();
    int64_t stage = 2;
    for (int s = 0; s < a->n_spans && stage < 8; ++s) {
      const LongchatSpan& span = a->spans[s];
      if (!span.observe) continue;
      while (team.take(stage, span.observe_groups * chunks_of(span), 1, &begin, &end)) {
        const int64_t group = begin / chunks_of(span), low = begin % chunks_of(span) * kKeys;
        observe(span, kept + first_logit[s], group, low, low + kKeys < span.keys ? low + kKeys : span.keys);
      }
      ++stage;
    }
  });
}

}  // namespace
