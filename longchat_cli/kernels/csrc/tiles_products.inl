// A layer's products for many rows with tile instructions (AMX, bfloat16). Weights become bfloat16 a few
// columns of the result at a time, which stay in the cache while all rows pass over them.

namespace {

constexpr int kPanel = 128;  // columns of a result whose weights are laid out together

// Weights of one tile, 16 rows of a low-bit product: [cols / 32][pair of columns][row][2].
template <int BITS, int GROUP, bool MINIMA>
void lay_tile(const LongchatLinear& w, const uint8_t* record, uint16_t* to) {
  constexpr int kGroups = kBlock / GROUP;
  const int64_t step = record_bytes(w);
  // Both halves' words in turn: low 0, high 0, low 1, ...
  alignas(64) uint16_t order[32];
  for (int i = 0; i < 32; ++i) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
  const __m512i in_turn = _mm512_load_si512(order), byte = _mm512_set1_epi32(255);
  for (int block = 0; block < padded(w.cols) / kBlock; ++block, record += step, to += 512) {
    Codes<BITS> code;
    code.load(record);
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(record + codes_bytes(BITS));
    for (int j = 0; j < 8; ++j) {
      const int part = j * 4 / GROUP;
      const __m512 scale = halves16(scales + 16 * part);
      const __m512 least = MINIMA ? halves16(scales + 16 * (kGroups + part)) : _mm512_mul_ps(_mm512_set1_ps(-1.0f * w.offset), scale);
      __m512 x[4];
      for (int t = 0; t < 4; ++t)
        x[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(code.w[j], 8 * t), byte)), scale, least);
      for (int t = 0; t < 4; t += 2)
        _mm512_storeu_si512(to + j * 64 + t * 16, _mm512_permutexvar_epi16(in_turn, (__m512i)_mm512_cvtne2ps_pbh(x[t + 1], x[t])));
    }
  }
}

using LayTile = void (*)(const LongchatLinear&, const uint8_t*, uint16_t*);

template <int BITS>
LayTile lay_tile_for(const LongchatLinear& w) {
  if (w.group == 16) return w.offset < 0 ? lay_tile<BITS, 16, true> : lay_tile<BITS, 16, false>;
  return w.offset < 0 ? lay_tile<BITS, 32, true> : lay_tile<BITS, 32, false>;
}

// Weights of rows [16 first, 16 (first + tiles)): a tile product's right sides, tile after tile. Those beyond the last row
// are 0.
void lay_weights(const LongchatLinear& w, int first, int tiles, uint16_t* to) {
  const int64_t laid = 16 * padded(w.cols);
  for (int t = first; t < first + tiles; ++t, to += laid) {
    const int left = w.rows - 16 * t;
    if (left <= 0) {
      memset(to, 0, laid * 2);
    } else if (w.bits == 16) {
      lay_keys(reinterpret_cast<const uint16_t*>(w.codes) + static_cast<int64_t>(16 * t) * w.cols, w.cols, left < 16 ? left : 16,
               w.cols, padded(w.cols), to);
    } else {
      const LayTile lay = w.bits == 4 ? lay_tile_for<4>(w) : w.bits == 5 ? lay_tile_for<5>(w) : lay_tile_for<8>(w);
      lay(w, w.codes + t * record_bytes(w) * (padded(w.cols) / kBlock), to);
    }
  }
}

// Some rows of low-bit weights, from a multiple of 16 on.
LongchatLinear rows_of(LongchatLinear w, int first, int rows) {
  w.codes += first / 16 * record_bytes(w) * (padded(w.cols) / kBlock);
  w.rows = rows;
  return w;
}

// y [32 rows, 32 columns], rows `stride` apart, = x [32, cols] times two tiles of weights.
inline void multiply_tiles(const uint16_t* x, int cols, const uint16_t* weights, float* y, int64_t stride) {
  const uint16_t *left = weights, *right = weights + 16 * cols;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int slab = 0; slab < cols / 32; ++slab) {
    _tile_loadd(4, x + slab * 32, cols * 2);
    _tile_loadd(6, left + slab * 512, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right + slab * 512, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, x + 16 * cols + slab * 32, cols * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, y, stride * 4);
  _tile_stored(1, y + 16, stride * 4);
  _tile_stored(2, y + 16 * stride, stride * 4);
  _tile_stored(3, y + 16 * stride + 16, stride * 4);
}

// Rows of bfloat16 that a product takes: [rows, cols], both rounded up to 32, zeros beyond `cols`.
struct Rows {
  uint16_t* x;
  int rows, cols;
  static int64_t bytes(int rows, int cols) { return static_cast<int64_t>(up(rows, 32)) * padded(cols) * 2; }
  Rows(int n, int width, Scratch& memory) : x(memory.take<uint16_t>(bytes(n, width) / 2)), rows(n), cols(padded(width)) {}
  uint16_t* at(int64_t row) const { return x + row * cols; }
};

// What a thread works in, for products of up to `cols` columns of weights.
struct Panel {
  uint16_t* weights;  // [kPanel, cols]
  float* y;           // [32, kPanel]
  static int64_t bytes(int cols) { return static_cast<int64_t>(kPanel) * padded(cols) * 2 + 32 * kPanel * 4; }
  Panel(char* memory, int cols, int thread) {
    y = reinterpret_cast<float*>(memory + thread * bytes(cols));
    weights = reinterpret_cast<uint16_t*>(y + 32 * kPanel);
  }
};

// `done` (first row, first column, y [32, kPanel], columns) with the products of x with all rows of `parts`, which have
// the same columns and are taken side by side: of n parts kPanel / n columns each. Threads share panels and, where
// there are few of these, rows.
template <int N, typename F>
void multiply_rows(const LongchatLinear* const (&parts)[N], const Rows& x, Panel& panel, Team& team, int stage, F&& done) {
  constexpr int kColumns = kPanel / N;
  const int panels = (parts[0]->rows + kColumns - 1) / kColumns, blocks = (x.rows + 31) / 32;
  int runs = 1;
  while (panels * runs < 3 * team.size() && runs * 4 < blocks) runs *= 2;
  const int run = (blocks + runs - 1) / runs;
  int64_t begin, end;
  while (team.take(stage, static_cast<int64_t>(panels) * runs, 1, &begin, &end)) {
    const int column = static_cast<int>(begin / runs) * kColumns, first = static_cast<int>(begin % runs) * run;
    const int left = parts[0]->rows - column, columns = left < kColumns ? left : kColumns, pairs = (columns + 31) / 32;
    for (int part = 0; part < N; ++part)
      lay_weights(*parts[part], column / 16, 2 * pairs, panel.weights + static_cast<int64_t>(part) * kColumns * x.cols);
    for (int block = first; block < blocks && block < first + run; ++block) {
      for (int part = 0; part < N; ++part)
        for (int pair = 0; pair < pairs; ++pair) {
          const int at = part * kColumns + pair * 32;
          multiply_tiles(x.at(32 * block), x.cols, panel.weights + static_cast<int64_t>(at) * x.cols, panel.y + at, kPanel);
        }
      done(32 * block, column, panel.y, columns);
    }
  }
}

// As above for one part, to y [rows, stride].
void multiply_to(const LongchatLinear& w, const Rows& x, Panel& panel, Team& team, int stage, float* y, int64_t stride) {
  const LongchatLinear* const one[1] = {&w};
  multiply_rows(one, x, panel, team, stage, [&](int row, int column, const float* from, int columns) {
    for (int r = 0; r < 32 && row + r < x.rows; ++r) memcpy(y + (row + r) * stride + column, from + r * kPanel, columns * 4);
  });
}

// to [columns] = act(gate) * up, where gate and up lie beside one another in a panel's row.
inline void gate_row(const LongchatModel& m, const float* gate, int columns, uint16_t* to) {
  const float* up = gate + kPanel / 2;
  if (m.gelu)
    for (int i = 0; i < columns; ++i) to[i] = narrow(gelu(gate[i]) * up[i]);
  else
    for (int i = 0; i < columns; ++i) to[i] = narrow(silu(gate[i]) * up[i]);
}

template <typename F>
void share_rows(Team& team, int stage, int rows, F&& body) {
  int64_t begin, end;
  while (team.take(stage, rows, 16, &begin, &end))
    for (int64_t row = begin; row < end; ++row) body(row);
}

inline void norm_row(const float* x, const float* weight, float eps, int n, const Rows& rows, int64_t row) {
  const float factor = norm_factor(x, n, eps);
  uint16_t* to = rows.at(row);
  for (int i = 0; i < n; ++i) to[i] = narrow(x[i] * factor * weight[i]);
  for (int i = n; i < rows.cols; ++i) to[i] = 0;
}

// A branch's row joins x, normed first where the model does so; y is changed.
inline void join_row(float* x, float* y, const float* bias, const float* after, float eps, int n) {
  for (int i = 0; bias && i < n; ++i) y[i] += bias[i];
  const float factor = after ? norm_factor(y, n, eps) : 1.0f;
  for (int i = 0; i < n; ++i) x[i] += after ? y[i] * factor * after[i] : y[i];
}

// A team whose tiles are configured.
template <typename F>
void parallel_tiles(int threads, F&& body) {
  parallel(threads, [&](Team& team, int thread) {
    const TileConfig config;
    _tile_loadconfig(&config);
    body(team, thread);
    _tile_release();
  });
}

void enter_many(const LongchatModel* m, const LongchatBlock* b, const float* x, int rows, const float* cos,
                const float* sin, int planes, uint16_t* q, uint16_t* k, uint16_t* v) {
  const int64_t all = (m->heads + 2 * m->kv_heads) * m->dim, head = static_cast<int64_t>(rows) * m->dim;
  scratch.reset(Rows::bytes(rows, m->width) + rows * all * 4 + m->threads * Panel::bytes(m->width));
  const Rows normed(rows, m->width, scratch);
  float* heads = scratch.take<float>(rows * all);
  char* panels = scratch.take<char>(m->threads * Panel::bytes(m->width));
  const Places places{cos, sin, planes, q, k, v, head, head, head};
  parallel_tiles(m->threads, [&](Team& team, int thread) {
    Panel panel(panels, m->width, thread);
    share_rows(team, 0, rows, [&](int64_t row) {
      norm_row(x + row * m->width, b->attention_norm, m->eps, m->width, normed, row);
    });
    team.barrier();
    float* to = heads;
    for (int part = 0; part < 3; ++part) {
      if (b->qkv[part].rows) multiply_to(b->qkv[part], normed, panel, team, part, to, all);
      to += b->qkv[part].rows;
    }
    team.barrier();
    share_rows(team, 0, rows, [&](int64_t row) { place_row(*m, *b, heads + row * all, static_cast<int>(row), places); });
  });
}

void leave_many(const LongchatModel* m, const LongchatBlock* b, float* x, int rows, const uint16_t* out,
                int64_t out_head, int64_t out_row) {
  const int attended = m->heads * m->dim, widest = attended > m->hidden ? attended : m->hidden;
  const int cols = widest > m->width ? widest : m->width;
  const int64_t width = m->width;
  scratch.reset(Rows::bytes(rows, attended) + Rows::bytes(rows, m->width) + Rows::bytes(rows, m->hidden) + rows * width * 4 +
                m->threads * Panel::bytes(cols));
  const Rows seen(rows, attended, scratch), normed(rows, m->width, scratch), gated(rows, m->hidden, scratch);
  float* y = scratch.take<float>(rows * width);
  char* panels = scratch.take<char>(m->threads * Panel::bytes(cols));
  // Gate and up may be one product.
  const bool one = b->gate_up[1].rows == 0;
  const LongchatLinear gate = rows_of(b->gate_up[0], 0, m->hidden);
  const LongchatLinear up_to = one ? rows_of(b->gate_up[0], m->hidden, m->hidden) : b->gate_up[1];
  parallel_tiles(m->threads, [&](Team& team, int thread) {
    Panel panel(panels, cols, thread);
    share_rows(team, 0, rows, [&](int64_t row) {
      for (int h = 0; h < m->heads; ++h) memcpy(seen.at(row) + h * m->dim, out + h * out_head + row * out_row, m->dim * 2);
      memset(seen.at(row) + attended, 0, (seen.cols - attended) * 2);
    });
    team.barrier();
    multiply_to(b->o[0], seen, panel, team, 0, y, width);
    team.barrier();
    share_rows(team, 0, rows, [&](int64_t row) {
      join_row(x + row * width, y + row * width, b->o_bias, b->after_attention, m->eps, m->width);
      norm_row(x + row * width, b->mlp_norm, m->eps, m->width, normed, row);
      memset(gated.at(row) + m->hidden, 0, (gated.cols - m->hidden) * 2);
    });
    team.barrier();
    const LongchatLinear* const both[2] = {&gate, &up_to};
    multiply_rows(both, normed, panel, team, 0, [&](int row, int column, const float* from, int columns) {
      for (int r = 0; r < 32 && row + r < rows; ++r) gate_row(*m, from + r * kPanel, columns, gated.at(row + r) + column);
    });
    team.barrier();
    multiply_to(b->down[0], gated, panel, team, 0, y, width);
    team.barrier();
    share_rows(team, 0, rows, [&](int64_t row) {
      join_row(x + row * width, y + row * width, nullptr, b->after_mlp, m->eps, m->width);
    });
  });
}

}  // namespace
