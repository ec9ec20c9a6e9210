// The kernels, compiled once for each instruction set. Plain loops over arrays of fixed size become vectors;
// only the dot products are spelled out. Includes nothing: the file that includes it has done so.

namespace {

constexpr int kTile = 16;    // rows of a tile
constexpr int kBlock = 32;   // columns of a record
constexpr int kKeys = 256;   // keys that a thread takes at once
constexpr int kMaxDim = 512;
constexpr int kAhead = 2048;  // bytes of weights asked for beforehand: the processor foresees no page's beginning

using longchat::Phase;
using longchat::Team;
using longchat::parallel;
using longchat::watch;

inline float as_float(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t as_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}
inline float widen(uint16_t x) { return as_float(static_cast<uint32_t>(x) << 16); }
inline uint16_t narrow(float x) {  // to nearest, ties to even
  const uint32_t bits = as_bits(x);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline float half(uint16_t h) {  // float16, without its infinities
  const uint32_t sign = (h & 0x8000u) << 16, rest = h & 0x7fffu;
  return as_float(sign | as_bits(as_float(rest << 13) * as_float(0x77800000)));  // x 2^112
}

// e^x for x <= 0, 2 units in the last place; 0 below -87.
inline float exponential(float x) {
  const float low = x < -87.0f ? -87.0f : x;
  const float t = low * 1.44269504f + 12582912.0f;  // rounds to an integer
  const float n = t - 12582912.0f;
  const float r = (low - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const float y = p * as_float(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
  return x < -87.0f ? 0.0f : y;
}
inline float sigmoid(float x) {
  const float e = exponential(x > 0 ? -x : x);
  return (x > 0 ? 1.0f : e) / (1.0f + e);
}
inline float silu(float x) { return x * sigmoid(x); }
inline float gelu(float x) { return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x)); }

inline float sum_of_squares(const float* x, int n) {
  float lanes[16] = {};
  int i = 0;
  for (; i + 16 <= n; i += 16)
    for (int l = 0; l < 16; ++l) lanes[l] += x[i + l] * x[i + l];
  float sum = 0;
  for (int l = 0; l < 16; ++l) sum += lanes[l];
  for (; i < n; ++i) sum += x[i] * x[i];
  return sum;
}

inline float norm_factor(const float* x, int n, float eps) {
  return 1.0f / __builtin_sqrtf(sum_of_squares(x, n) / n + eps);
}

// ---- activations -------------------------------------------------------------------------------------------

// A row of activations as int8 numbers with a scale for each `group` columns: x = scale (code + fine / 254).
struct Quantized {
  int8_t* codes;   // [2, columns rounded up to 32]: codes, then what they leave
  float* scale;    // [groups]
  float* sum;      // [groups], of x: what a weight's minimum is multiplied with
  int32_t* whole;  // [2, groups], sums of both
};

inline int padded(int cols) { return (cols + kBlock - 1) / kBlock * kBlock; }
inline int groups16(int cols) { return padded(cols) / 16; }
inline int64_t quantized_bytes(int cols) { return padded(cols) * 2 + groups16(cols) * 16; }

inline Quantized quantized_at(char* memory, int cols) {
  Quantized q;
  q.codes = reinterpret_cast<int8_t*>(memory);
  q.scale = reinterpret_cast<float*>(memory + padded(cols) * 2);
  q.sum = q.scale + groups16(cols);
  q.whole = reinterpret_cast<int32_t*>(q.sum + groups16(cols));
  return q;
}

inline float nearest(float x) { return (x + 12582912.0f) - 12582912.0f; }  // below 2^22

inline void quantize(const float* x, int cols, int group, Quantized q) {
  const int all = padded(cols);
  for (int g = 0; g * group < all; ++g) {
    float part[kBlock] = {}, most[16] = {};
    const int begin = g * group;
    for (int i = 0; i < group && begin + i < cols; ++i) part[i] = x[begin + i];
    for (int i = 0; i < group; i += 16)
      for (int l = 0; l < 16; ++l) {
        const float size = __builtin_fabsf(part[i + l]);
        most[l] = size > most[l] ? size : most[l];
      }
    float largest = 0;
    for (int l = 0; l < 16; ++l) largest = most[l] > largest ? most[l] : largest;
    const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;  // below, the quotient may be infinite
    int32_t whole = 0, fine = 0;
    for (int i = 0; i < group; ++i) {
      const float scaled = part[i] * inverse, code = nearest(scaled), rest = nearest((scaled - code) * 254.0f);
      q.codes[begin + i] = static_cast<int8_t>(code);
      q.codes[all + begin + i] = static_cast<int8_t>(rest);
      whole += static_cast<int32_t>(code);
      fine += static_cast<int32_t>(rest);
    }
    q.scale[g] = largest / 127.0f;
    q.whole[g] = whole;
    q.whole[groups16(cols) + g] = fine;
    q.sum[g] = q.scale[g] * (whole + fine / 254.0f);
  }
}

// ---- products ----------------------------------------------------------------------------------------------

inline int64_t codes_bytes(int bits) { return bits == 4 ? 256 : bits == 5 ? 320 : 512; }

inline int64_t record_bytes(const LongchatLinear& w) {
  return codes_bytes(w.bits) + (kBlock / w.group) * (w.offset < 0 ? 64 : 32);
}

// Integer dots of 16 rows' codes with a row's, for columns 0 to 15 and 16 to 31 of a record.
template <int BITS>
struct Codes;

#if defined(LONGCHAT_AVX512)

using Sum16 = __m512;
inline Sum16 zero16() { return _mm512_setzero_ps(); }
inline Sum16 halves16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Sum16 times(float s, Sum16 x) { return _mm512_mul_ps(_mm512_set1_ps(s), x); }
inline Sum16 fused(Sum16 a, Sum16 b, Sum16 c) { return _mm512_fmadd_ps(a, b, c); }
inline Sum16 spread(float s) { return _mm512_set1_ps(s); }
inline void store16(float* p, Sum16 x) { _mm512_storeu_ps(p, x); }
inline Sum16 floats16(const float* p) { return _mm512_loadu_ps(p); }
inline Sum16 larger16(Sum16 a, Sum16 b) { return _mm512_max_ps(a, b); }
// Of 16 bytes the low and the high four bits, less 8.
inline void nibbles16(const uint8_t* p, Sum16* low, Sum16* high) {
  const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512i eight = _mm512_set1_epi32(8), mask = _mm512_set1_epi32(15);
  *low = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_and_si512(both, mask), eight));
  *high = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_srli_epi32(both, 4), eight));
}

template <int BITS>
struct Codes {
  __m512i w[8];
  inline void load(const uint8_t* p) {
    const __m512i low = _mm512_set1_epi8(15);
    if (BITS == 8) {
      for (int j = 0; j < 8; ++j) w[j] = _mm512_loadu_si512(p + 64 * j);
      return;
    }
    for (int j = 0; j < 4; ++j) {
      const __m512i pair = _mm512_loadu_si512(p + 64 * j);
      w[j] = _mm512_and_si512(pair, low);
      w[4 + j] = _mm512_and_si512(_mm512_srli_epi16(pair, 4), low);
    }
    if (BITS == 5)
      for (int j = 0; j < 8; ++j) {
        uint64_t high;
        __builtin_memcpy(&high, p + 256 + 8 * j, 8);
        w[j] = _mm512_mask_add_epi8(w[j], high, w[j], _mm512_set1_epi8(16));
      }
  }
  inline __m512i half_dot(const int8_t* x, int first) const {
    __m512i sum = _mm512_setzero_si512();
    for (int j = first; j < first + 4; ++j) {
      int32_t four;
      __builtin_memcpy(&four, x + 4 * j, 4);
      sum = _mm512_dpbusd_epi32(sum, w[j], _mm512_set1_epi32(four));
    }
    return sum;
  }
  inline Sum16 dot(const int8_t* x, int32_t, int part) const {
    return _mm512_cvtepi32_ps(half_dot(x, 4 * part));
  }
  inline Sum16 dot(const int8_t* x, int32_t) const {
    return _mm512_cvtepi32_ps(_mm512_add_epi32(half_dot(x, 0), half_dot(x, 4)));
  }
};

#elif defined(LONGCHAT_AVX2)

struct Sum16 {
  __m256 a, b;
};
inline Sum16 zero16() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Sum16 halves16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline Sum16 spread(float s) { return {_mm256_set1_ps(s), _mm256_set1_ps(s)}; }
inline Sum16 times(float s, Sum16 x) {
  return {_mm256_mul_ps(_mm256_set1_ps(s), x.a), _mm256_mul_ps(_mm256_set1_ps(s), x.b)};
}
inline Sum16 fused(Sum16 a, Sum16 b, Sum16 c) {
  return {_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)};
}
inline void store16(float* p, Sum16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline Sum16 floats16(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Sum16 larger16(Sum16 a, Sum16 b) { return {_mm256_max_ps(a.a, b.a), _mm256_max_ps(a.b, b.b)}; }
inline __m256 less8(__m256i codes) { return _mm256_cvtepi32_ps(_mm256_sub_epi32(codes, _mm256_set1_epi32(8))); }
inline void nibbles16(const uint8_t* p, Sum16* low, Sum16* high) {
  const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m256i a = _mm256_cvtepu8_epi32(both), b = _mm256_cvtepu8_epi32(_mm_srli_si128(both, 8));
  const __m256i mask = _mm256_set1_epi32(15);
  *low = {less8(_mm256_and_si256(a, mask)), less8(_mm256_and_si256(b, mask))};
  *high = {less8(_mm256_srli_epi32(a, 4)), less8(_mm256_srli_epi32(b, 4))};
}

template <int BITS>
struct Codes {
  __m256i w[8][2];
  inline void load(const uint8_t* p) {
    const __m256i low = _mm256_set1_epi8(15);
    for (int h = 0; h < 2; ++h) {
      if (BITS == 8) {
        for (int j = 0; j < 8; ++j) w[j][h] = at(p + 64 * j + 32 * h);
        continue;
      }
      for (int j = 0; j < 4; ++j) {
        const __m256i pair = at(p + 64 * j + 32 * h);
        w[j][h] = _mm256_and_si256(pair, low);
        w[4 + j][h] = _mm256_and_si256(_mm256_srli_epi16(pair, 4), low);
      }
      if (BITS == 5)
        for (int j = 0; j < 8; ++j) {
          uint32_t high;
          __builtin_memcpy(&high, p + 256 + 8 * j + 4 * h, 4);
          w[j][h] = _mm256_add_epi8(w[j][h], _mm256_and_si256(bits_to_bytes(high), _mm256_set1_epi8(16)));
        }
    }
  }
  static inline __m256i at(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static inline __m256i bits_to_bytes(uint32_t bits) {
    const __m256i place = _mm256_setr_epi64x(0x0000000000000000, 0x0101010101010101, 0x0202020202020202,
                                             0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201ull));
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int32_t>(bits)), place);
    return _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
  }
  // Eight-bit codes as signed ones: code - 128, so that no pair of products leaves int16.
  inline __m256i half_dot(const int8_t* x, int first, int h) const {
    __m256i sum = _mm256_setzero_si256();
    for (int j = first; j < first + 4; ++j) {
      int32_t four;
      __builtin_memcpy(&four, x + 4 * j, 4);
      const __m256i other = _mm256_set1_epi32(four);
      __m256i pairs;
      if (BITS == 8) {
        const __m256i code = _mm256_xor_si256(w[j][h], _mm256_set1_epi8(-128));
        // Signs go to the activations: -128 has no opposite in int8.
        pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(other, code));
      } else {
        pairs = _mm256_maddubs_epi16(w[j][h], other);
      }
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return sum;
  }
  static inline __m256 floats(__m256i sum, int32_t whole) {
    if (BITS == 8) sum = _mm256_add_epi32(sum, _mm256_set1_epi32(128 * whole));
    return _mm256_cvtepi32_ps(sum);
  }
  inline Sum16 dot(const int8_t* x, int32_t whole, int part) const {
    return {floats(half_dot(x, 4 * part, 0), whole), floats(half_dot(x, 4 * part, 1), whole)};
  }
  inline Sum16 dot(const int8_t* x, int32_t whole) const {
    return {floats(_mm256_add_epi32(half_dot(x, 0, 0), half_dot(x, 4, 0)), whole),
            floats(_mm256_add_epi32(half_dot(x, 0, 1), half_dot(x, 4, 1)), whole)};
  }
};

#else

struct Sum16 {
  float x[16];
};
inline Sum16 zero16() { return {}; }
inline Sum16 halves16(const uint16_t* p) {
  Sum16 s;
  for (int r = 0; r < 16; ++r) s.x[r] = half(p[r]);
  return s;
}
inline Sum16 spread(float f) {
  Sum16 s;
  for (int r = 0; r < 16; ++r) s.x[r] = f;
  return s;
}
inline Sum16 times(float f, Sum16 a) {
  for (int r = 0; r < 16; ++r) a.x[r] *= f;
  return a;
}
inline Sum16 fused(const Sum16& a, const Sum16& b, Sum16 c) {
  for (int r = 0; r < 16; ++r) c.x[r] += a.x[r] * b.x[r];
  return c;
}
inline void store16(float* p, const Sum16& s) { __builtin_memcpy(p, s.x, 64); }
inline Sum16 floats16(const float* p) {
  Sum16 s;
  __builtin_memcpy(s.x, p, 64);
  return s;
}
inline Sum16 larger16(Sum16 a, const Sum16& b) {
  for (int r = 0; r < 16; ++r) a.x[r] = a.x[r] > b.x[r] ? a.x[r] : b.x[r];
  return a;
}
inline void nibbles16(const uint8_t* p, Sum16* low, Sum16* high) {
  for (int i = 0; i < 16; ++i) {
    low->x[i] = static_cast<float>((p[i] & 15) - 8);
    high->x[i] = static_cast<float>((p[i] >> 4) - 8);
  }
}

template <int BITS>
struct Codes {
  uint8_t w[8][64];
  inline void load(const uint8_t* p) {
    if (BITS == 8) {
      __builtin_memcpy(w, p, 512);
      return;
    }
    for (int j = 0; j < 4; ++j)
      for (int i = 0; i < 64; ++i) {
        w[j][i] = p[64 * j + i] & 15;
        w[4 + j][i] = p[64 * j + i] >> 4;
      }
    if (BITS == 5)
      for (int j = 0; j < 8; ++j)
        for (int i = 0; i < 64; ++i) w[j][i] |= ((p[256 + 8 * j + i / 8] >> (i % 8)) & 1) << 4;
  }
  inline void add(const int8_t* x, int first, int32_t* sum) const {
    for (int j = first; j < first + 4; ++j) {
#if defined(__ARM_FEATURE_DOTPROD)
      // Eight-bit codes do not fit int8: code - 128, and 128 times the activations' sum afterwards.
      const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(*reinterpret_cast<const int32_t*>(x + 4 * j)));
      for (int i = 0; i < 4; ++i) {
        uint8x16_t code = vld1q_u8(w[j] + 16 * i);
        if (BITS == 8) code = veorq_u8(code, vdupq_n_u8(128));
        vst1q_s32(sum + 4 * i, vdotq_s32(vld1q_s32(sum + 4 * i), vreinterpretq_s8_u8(code), four));
      }
#else
      for (int r = 0; r < 16; ++r)
        for (int t = 0; t < 4; ++t) sum[r] += static_cast<int32_t>(w[j][4 * r + t]) * x[4 * j + t];
#endif
    }
  }
  static inline Sum16 floats(const int32_t* sum, int32_t whole) {
#if defined(__ARM_FEATURE_DOTPROD)
    const int32_t more = BITS == 8 ? 128 * whole : 0;
#else
    const int32_t more = 0 * whole;
#endif
    Sum16 s;
    for (int r = 0; r < 16; ++r) s.x[r] = static_cast<float>(sum[r] + more);
    return s;
  }
  inline Sum16 dot(const int8_t* x, int32_t whole, int part) const {
    int32_t sum[16] = {};
    add(x, 4 * part, sum);
    return floats(sum, whole);
  }
  inline Sum16 dot(const int8_t* x, int32_t whole) const {
    int32_t sum[16] = {};
    add(x, 0, sum);
    add(x, 4, sum);
    return floats(sum, whole);
  }
};

#endif

// One tile times ROWS rows of activations: 16 results for each.
template <int BITS, int GROUP, bool MINIMA, int ROWS>
void tile(const LongchatLinear& w, const uint8_t* record, const Quantized* x, float (*y)[kTile]) {
  constexpr int kGroups = kBlock / GROUP;
  const int blocks = padded(w.cols) / kBlock, all = padded(w.cols), groups = groups16(w.cols);
  const int64_t step = record_bytes(w);
  Sum16 sum[ROWS];
  for (int r = 0; r < ROWS; ++r) sum[r] = zero16();
  for (int b = 0; b < blocks; ++b, record += step) {
    for (int64_t line = 0; line < step; line += 64) __builtin_prefetch(record + kAhead + line);
    Codes<BITS> code;
    code.load(record);
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(record + codes_bytes(BITS));
    for (int part = 0; part < kGroups; ++part) {
      const int g = b * kGroups + part;
      const Sum16 scale = halves16(scales + 16 * part);
      const Sum16 least = MINIMA ? halves16(scales + 16 * (kGroups + part)) : times(-1.0f * w.offset, scale);
      for (int r = 0; r < ROWS; ++r) {
        auto dot = [&](int plane) {
          const int8_t* at = x[r].codes + plane * all + kBlock * b;
          const int32_t whole = x[r].whole[plane * groups + g];
          return kGroups == 1 ? code.dot(at, whole) : code.dot(at, whole, part);
        };
        const Sum16 product = fused(spread(1.0f / 254.0f), dot(1), dot(0));
        sum[r] = fused(times(x[r].scale[g], product), scale, sum[r]);
        sum[r] = fused(spread(x[r].sum[g]), least, sum[r]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) store16(y[r], sum[r]);
}

using Tile = void (*)(const LongchatLinear&, const uint8_t*, const Quantized*, float (*)[kTile]);

template <int BITS, int GROUP, bool MINIMA>
Tile tile_for(int rows) {
  return rows == 1   ? tile<BITS, GROUP, MINIMA, 1>
         : rows == 2 ? tile<BITS, GROUP, MINIMA, 2>
         : rows == 3 ? tile<BITS, GROUP, MINIMA, 3>
                     : tile<BITS, GROUP, MINIMA, 4>;
}

template <int BITS>
Tile tile_for(const LongchatLinear& w, int rows) {
  const bool minima = w.offset < 0;
  if (w.group == 16) return minima ? tile_for<BITS, 16, true>(rows) : tile_for<BITS, 16, false>(rows);
  return minima ? tile_for<BITS, 32, true>(rows) : tile_for<BITS, 32, false>(rows);
}

Tile tile_for(const LongchatLinear& w, int rows) {
  return w.bits == 4 ? tile_for<4>(w, rows) : w.bits == 5 ? tile_for<5>(w, rows) : tile_for<8>(w, rows);
}

inline float dot_bf16(const uint16_t* w, const float* x, int n) {
  float lanes[32] = {};
  int i = 0;
  for (; i + 32 <= n; i += 32)
    for (int l = 0; l < 32; ++l) lanes[l] += widen(w[i + l]) * x[i + l];
  for (int l = 0; l < 16; ++l) lanes[l] += lanes[l + 16];
  float sum = 0;
  for (int l = 0; l < 16; ++l) sum += lanes[l];
  for (; i < n; ++i) sum += widen(w[i]) * x[i];
  return sum;
}

// Scratch of a call: bump allocation from memory that a thread keeps.
class Scratch {
 public:
  template <typename T>
  T* take(int64_t count) {
    const int64_t bytes = (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    char* at = memory_ + used_;
    used_ += bytes;
    return reinterpret_cast<T*>(at);
  }
  // Room for so many bytes in all; what was taken before is gone. Much more than that is given back. Throws
  // bad_alloc.
  void reset(int64_t bytes) {
    used_ = 0;
    bytes += 64 * 64;
    if (bytes <= size_ && size_ <= (bytes > kKept ? bytes : kKept)) return;
    __builtin_free(memory_);
    size_ = 0;
    memory_ = static_cast<char*>(aligned_alloc(64, (bytes + 63) / 64 * 64));
    if (!memory_) throw std::bad_alloc();
    size_ = bytes;
  }
  int64_t used() const { return used_; }
  void release(int64_t used) { used_ = used; }

 private:
  static constexpr int64_t kKept = 32 << 20;  // bytes that a small call leaves as they are
  char* memory_ = nullptr;
  int64_t size_ = 0, used_ = 0;
};

thread_local Scratch scratch;  // of the thread that calls

// The rows that a product takes: as they are, and quantized as its parts want them.
constexpr int kRows = 8;
constexpr int kTogether = 4;  // rows whose sums fit the registers
constexpr int kParts = 3;

struct Input {
  const float* x;
  Quantized rows[kParts][kRows];
};

inline int64_t input_bytes(int cols, int rows) { return kParts * rows * (quantized_bytes(cols) + 64); }

// `memory` has input_bytes.
template <int N>
Input quantized_input(const LongchatLinear (&w)[N], const float* x, int rows, char* memory) {
  Input input{x, {}};
  for (int part = 0; part < N; ++part) {
    if (w[part].rows == 0 || w[part].bits == 16) continue;
    for (int r = 0; r < rows; ++r) {
      Quantized& to = input.rows[part][r];
      if (part && w[part].group == w[0].group && w[0].bits != 16) {
        to = input.rows[0][r];
        continue;
      }
      to = quantized_at(memory, w[part].cols);
      memory += (quantized_bytes(w[part].cols) + 63) / 64 * 64;
      quantize(x + static_cast<int64_t>(r) * w[part].cols, w[part].cols, w[part].group, to);
    }
  }
  return input;
}

template <int N>
int rows_of(const LongchatLinear (&w)[N]) {
  int all = 0;
  for (const LongchatLinear& part : w) all += part.rows;
  return all;
}

void multiply_part(const LongchatLinear& w, const float* x, const Quantized* quantized, float* y, int64_t stride,
                   int rows, Team& team, int stage) {
  const int64_t tiles = (w.rows + kTile - 1) / kTile;
  const int64_t share = tiles / (team.size() * 6), step = share < 1 ? 1 : share > 64 ? 64 : share;
  const int64_t tile_bytes = w.bits == 16 ? 0 : record_bytes(w) * (padded(w.cols) / kBlock);
  int64_t begin, end;
  while (team.take(stage, tiles, step, &begin, &end))
    for (int64_t t = begin; t < end; ++t) {
      const int first = static_cast<int>(t) * kTile, n = w.rows - first < kTile ? w.rows - first : kTile;
      float found[kRows][kTile];
      if (w.bits == 16) {
        const uint16_t* weights = reinterpret_cast<const uint16_t*>(w.codes);
        for (int i = 0; i < n; ++i)
          for (int r = 0; r < rows; ++r)
            found[r][i] = dot_bf16(weights + static_cast<int64_t>(first + i) * w.cols,
                                   x + static_cast<int64_t>(r) * w.cols, w.cols);
      } else {
        for (int r = 0; r < rows; r += kTogether)
          tile_for(w, rows - r < kTogether ? rows - r : kTogether)(w, w.codes + t * tile_bytes, quantized + r, found + r);
      }
      for (int r = 0; r < rows; ++r)
        for (int i = 0; i < n; ++i) y[r * stride + first + i] = found[r][i];
    }
}

// This thread's share of y [rows, out of all parts]. Takes the stages from `stage` on.
template <int N>
void multiply(const LongchatLinear (&w)[N], const Input& input, float* y, int rows, Team& team, int stage = 0) {
  const int64_t stride = rows_of(w);
  for (int part = 0; part < N; ++part) {
    if (w[part].rows) multiply_part(w[part], input.x, input.rows[part], y, stride, rows, team, stage + part);
    y += w[part].rows;
  }
}

// As `multiply`, with all results there afterwards.
template <int N>
void multiply_all(const LongchatLinear (&w)[N], const Input& input, float* y, int rows, Team& team) {
  watch.lap(Phase::inputs);
  multiply(w, input, y, rows, team);
  watch.lap(Phase::products);
  team.barrier();
  watch.lap(Phase::waiting);
}

inline void norm(const float* x, const float* weight, float* y, int n, float eps) {
  const float factor = norm_factor(x, n, eps);
  for (int i = 0; i < n; ++i) y[i] = x[i] * factor * weight[i];
}

// ---- a layer -----------------------------------------------------------------------------------------------

// What a thread knows of a layer by itself: what stands between two products each computes anew, which takes less
// time than waiting for one that does it for all. The first thread's x is the caller's.
struct Own {
  float *x, *normed, *seen, *gated, *spare;
  char* memory;
  Input input;

  template <int N>
  void prepare(const LongchatLinear (&w)[N], const float* from, int rows) {
    input = quantized_input(w, from, rows, memory);
  }
  // As `prepare`, of x normed.
  template <int N>
  void prepare_normed(const LongchatLinear (&w)[N], const float* weight, float eps, int rows) {
    const int width = w[0].cols;
    for (int r = 0; r < rows; ++r) norm(x + r * width, weight, normed + r * width, width, eps);
    prepare(w, normed, rows);
  }
};

// What a layer of up to kRows rows computes in: the results of products, which all threads write and read.
struct Room {
  float *heads, *y, *wide;
  Own own[longchat::kMaxThreads];

  static int widest(const LongchatModel& m) {
    const int wider = m.width > m.hidden ? m.width : m.hidden, seen = m.heads * m.dim;
    return wider > seen ? wider : seen;
  }
  static int64_t bytes(const LongchatModel& m, int rows) {
    const int64_t shared = m.width + (m.heads + 2 * m.kv_heads) * m.dim + 2 * m.hidden;
    const int64_t alone = 2 * m.width + m.heads * m.dim + m.hidden;
    const int64_t own = (rows * alone + m.width) * 4 + input_bytes(widest(m), rows) + 6 * 64;
    return rows * shared * 4 + team_of(m) * own;
  }
  Room(const LongchatModel& m, int rows, float* x, Scratch& from) {
    y = from.take<float>(rows * m.width);
    heads = from.take<float>(rows * (m.heads + 2 * m.kv_heads) * m.dim);
    wide = from.take<float>(rows * 2 * m.hidden);
    for (int thread = 0; thread < team_of(m); ++thread) {
      Own& mine = own[thread];
      mine.x = thread ? from.take<float>(rows * m.width) : x;
      mine.normed = from.take<float>(rows * m.width);
      mine.seen = from.take<float>(rows * m.heads * m.dim);
      mine.gated = from.take<float>(rows * m.hidden);
      mine.spare = from.take<float>(m.width);
      mine.memory = from.take<char>(input_bytes(widest(m), rows));
      if (thread) __builtin_memcpy(mine.x, x, rows * m.width * 4);
    }
  }
  static int team_of(const LongchatModel& m) {
    return m.threads < 1 ? 1 : m.threads > longchat::kMaxThreads ? longchat::kMaxThreads : m.threads;
  }
};

// ---- the last product --------------------------------------------------------------------------------------

constexpr float kNear = 12.0f;  // so far below the largest logit a token has e^-12 of its probability: nobody's choice
constexpr int kSome = 512;      // logits that a thread takes at once

// What the upper bits of a row of weights leave of its product with x.
inline float rest_of(const uint8_t* row, const float* x, int blocks, int group) {
  Sum16 sum = zero16();
  for (int b = 0; b < blocks; ++b, row += 16 + kBlock / group * 2, x += kBlock) {
    uint16_t scale[2];
    __builtin_memcpy(scale, row + 16, 2);
    __builtin_memcpy(scale + 1, row + 14 + kBlock / group * 2, 2);
    Sum16 low, high;
    nibbles16(row, &low, &high);
    sum = fused(times(half(scale[0]), low), floats16(x), sum);
    sum = fused(times(half(scale[1]), high), floats16(x + 16), sum);
  }
  float lanes[16], all = 0;
  store16(lanes, sum);
  for (int l = 0; l < 16; ++l) all += lanes[l];
  return all;
}

inline float largest_of(const float* y, int n) {
  Sum16 most = spread(y[0]);
  int i = 0;
  for (; i + 16 <= n; i += 16) most = larger16(most, floats16(y + i));
  float lanes[16], largest = y[0];
  store16(lanes, most);
  for (int l = 0; l < 16; ++l) largest = lanes[l] > largest ? lanes[l] : largest;
  for (; i < n; ++i) largest = y[i] > largest ? y[i] : largest;
  return largest;
}

// Complete a row's logits that are not below `cut`.
void refine(const LongchatHead& head, const float* x, float* y, float cut, Team& team, int stage) {
  const int blocks = head.upper.cols / kBlock, group = head.upper.group;
  const int64_t bytes = blocks * (16 + kBlock / group * 2);
  int64_t begin, end;
  while (team.take(stage, head.upper.rows, kSome, &begin, &end)) {
    int n = 0, near[kSome + 1];
    for (int64_t i = begin; i < end; ++i) {
      near[n] = static_cast<int>(i);
      n += y[i] >= cut;
    }
    for (int j = 0; j < n; ++j) {
      for (int64_t line = 0; j + 2 < n && line < bytes; line += 64) __builtin_prefetch(head.rest + near[j + 2] * bytes + line);
      y[near[j]] += rest_of(head.rest + near[j] * bytes, x, blocks, group);
    }
  }
}

// Logits y [rows, out] of the states that `input` was made of. All threads come here.
void last_product(const LongchatHead& head, const Input& input, float* y, int rows, Team& team) {
  const LongchatLinear upper[1] = {head.upper};
  const int64_t out = head.upper.rows;
  multiply(upper, input, y, rows, team);
  if (!head.rest) return;
  team.barrier();
  float cut[kRows];
  for (int r = 0; r < rows; ++r) cut[r] = largest_of(y + r * out, head.upper.rows) - kNear;
  team.barrier();
  for (int r = 0; r < rows; ++r) refine(head, input.x + r * head.upper.cols, y + r * out, cut[r], team, r);
}

void logits(const LongchatHead* head, const float* weight, float eps, const float* x, float* y, int rows, int threads) {
  const LongchatLinear upper[1] = {head->upper};
  const int width = head->upper.cols;
  scratch.reset(input_bytes(width, rows) + static_cast<int64_t>(rows) * width * 4);
  float* normed = scratch.take<float>(static_cast<int64_t>(rows) * width);
  char* memory = scratch.take<char>(input_bytes(width, rows));
  for (int r = 0; weight && r < rows; ++r) norm(x + r * width, weight, normed + r * width, width, eps);
  const Input input = quantized_input(upper, weight ? normed : x, rows, memory);
  parallel(threads, [&](Team& team, int) { last_product(*head, input, y, rows, team); });
}

// Where a layer's queries, keys and values go, and how they are turned: heads so far apart, rows one after another.
struct Places {
  const float *cos, *sin;  // [rows, planes]
  int planes;
  uint16_t *q, *k, *v;
  int64_t q_head, k_head, v_head;
};

// One head's row: norm, then rotation of neighbours `planes` apart; to bfloat16.
inline void rotate_head(float* x, const float* weight, const float* cos, const float* sin, int planes, int dim,
                        float eps, uint16_t* to) {
  if (weight) norm(x, weight, x, dim, eps);
  for (int i = 0; i < planes; ++i) {
    // Rounded first, as products in bfloat16 come.
    const float a = widen(narrow(x[i])), b = widen(narrow(x[i + planes]));
    to[i] = narrow(a * cos[i] - b * sin[i]);
    to[i + planes] = narrow(b * cos[i] + a * sin[i]);
  }
  for (int i = 2 * planes; i < dim; ++i) to[i] = narrow(x[i]);
}

// One row's heads [q heads, k heads, v heads] x dim of float32, before the bias.
void place_row(const LongchatModel& m, const LongchatBlock& b, float* heads, int row, const Places& to) {
  const float *c = to.cos + static_cast<int64_t>(row) * to.planes, *s = to.sin + static_cast<int64_t>(row) * to.planes;
  if (b.qkv_bias)
    for (int i = 0; i < (m.heads + 2 * m.kv_heads) * m.dim; ++i) heads[i] += b.qkv_bias[i];
  for (int h = 0; h < m.heads + m.kv_heads; ++h, heads += m.dim) {
    const bool query = h < m.heads;
    uint16_t* at = (query ? to.q + h * to.q_head : to.k + (h - m.heads) * to.k_head) + static_cast<int64_t>(row) * m.dim;
    rotate_head(heads, query ? b.q_norm : b.k_norm, c, s, to.planes, m.dim, m.eps, at);
  }
  for (int h = 0; h < m.kv_heads; ++h, heads += m.dim)
    for (int i = 0; i < m.dim; ++i) to.v[h * to.v_head + static_cast<int64_t>(row) * m.dim + i] = narrow(heads[i]);
}

// q, k, v of x [rows, width] before rotation, to room.heads. All threads come here, and leave together.
void project(const LongchatModel& m, const LongchatBlock& b, int rows, Room& room, Team& team, int thread) {
  Own& own = room.own[thread];
  own.prepare_normed(b.qkv, b.attention_norm, m.eps, rows);
  multiply_all(b.qkv, own.input, room.heads, rows, team);
}

void place(const LongchatModel& m, const LongchatBlock& b, int rows, Room& room, const Places& to) {
  const int64_t all = (m.heads + 2 * m.kv_heads) * m.dim;
  for (int r = 0; r < rows; ++r) place_row(m, b, room.heads + r * all, r, to);
}

void enter(const LongchatModel* m, const LongchatBlock* b, const float* x, int rows, const float* cos,
           const float* sin, int planes, uint16_t* q, uint16_t* k, uint16_t* v) {
  scratch.reset(Room::bytes(*m, rows));
  Room room(*m, rows, const_cast<float*>(x), scratch);  // which only `finish` changes
  parallel(m->threads, [&](Team& team, int thread) { project(*m, *b, rows, room, team, thread); });
  const int64_t head = static_cast<int64_t>(rows) * m->dim;
  place(*m, *b, rows, room, {cos, sin, planes, q, k, v, head, head, head});
}

inline void join(float* x, const float* y, const float* after, float* spare, int n, float eps) {
  if (after) norm(y, after, spare, n, eps);
  for (int i = 0; i < n; ++i) x[i] += after ? spare[i] : y[i];
}

// gated [hidden] = act(gate) * up of one row.
inline void gate(const LongchatModel& m, const float* gate, const float* up, float* gated) {
  if (m.gelu)
    for (int i = 0; i < m.hidden; ++i) gated[i] = gelu(gate[i]) * up[i];
  else
    for (int i = 0; i < m.hidden; ++i) gated[i] = silu(gate[i]) * up[i];
}

// The attention's out [heads, rows, dim] joins x, then the MLP. All threads come here, each with all of x.
void finish(const LongchatModel& m, const LongchatBlock& b, int rows, const uint16_t* out, int64_t out_head,
            int64_t out_row, Room& room, Team& team, int thread) {
  const int64_t attended = m.heads * m.dim, width = m.width, hidden = m.hidden;
  Own& own = room.own[thread];
  for (int r = 0; r < rows; ++r)
    for (int h = 0; h < m.heads; ++h)
      for (int i = 0; i < m.dim; ++i)
        own.seen[r * attended + h * m.dim + i] = widen(out[h * out_head + r * out_row + i]);
  own.prepare(b.o, own.seen, rows);
  multiply_all(b.o, own.input, room.y, rows, team);
  for (int r = 0; r < rows; ++r) {
    const float* y = room.y + r * width;
    for (int i = 0; b.o_bias && i < width; ++i) own.normed[i] = y[i] + b.o_bias[i];
    join(own.x + r * width, b.o_bias ? own.normed : y, b.after_attention, own.spare, m.width, m.eps);
  }
  own.prepare_normed(b.gate_up, b.mlp_norm, m.eps, rows);
  multiply_all(b.gate_up, own.input, room.wide, rows, team);
  for (int r = 0; r < rows; ++r)
    gate(m, room.wide + r * 2 * hidden, room.wide + r * 2 * hidden + hidden, own.gated + r * hidden);
  own.prepare(b.down, own.gated, rows);
  multiply_all(b.down, own.input, room.y, rows, team);
  for (int r = 0; r < rows; ++r)
    join(own.x + r * width, room.y + r * width, b.after_mlp, own.spare, m.width, m.eps);
  watch.lap(Phase::inputs);
}

void leave(const LongchatModel* m, const LongchatBlock* b, float* x, int rows, const uint16_t* out,
           int64_t out_head, int64_t out_row) {
  scratch.reset(Room::bytes(*m, rows));
  Room room(*m, rows, x, scratch);
  parallel(m->threads, [&](Team& team, int thread) {
    finish(*m, *b, rows, out, out_head, out_row, room, team, thread);
  });
}

// ---- the same for many rows --------------------------------------------------------------------------------

template <typename F>
void each_row(int threads, int rows, F&& body) {
  const int share = rows / (threads * 4), step = share < 1 ? 1 : share;
  parallel(threads, [&](Team& team, int thread) {
    int64_t begin, end;
    while (team.take(0, rows, step, &begin, &end))
      for (int64_t row = begin; row < end; ++row) body(row, thread);
  });
}

void add_norm(float* x, const uint16_t* add, const float* after, const float* weight, uint16_t* out, int rows,
              int width, float eps, int threads) {
  each_row(threads, rows, [&](int64_t row, int) {
    float* at = x + row * width;
    if (add) {
      const uint16_t* more = add + row * width;
      if (after) {
        float squares = 0;
        for (int i = 0; i < width; ++i) squares += widen(more[i]) * widen(more[i]);
        const float factor = 1.0f / __builtin_sqrtf(squares / width + eps);
        for (int i = 0; i < width; ++i) at[i] += widen(more[i]) * factor * after[i];
      } else {
        for (int i = 0; i < width; ++i) at[i] += widen(more[i]);
      }
    }
    if (!out) return;
    const float factor = norm_factor(at, width, eps);
    for (int i = 0; i < width; ++i) out[row * width + i] = narrow(at[i] * factor * weight[i]);
  });
}

void rotate(const LongchatModel* m, const LongchatBlock* b, const uint16_t* const qkv[3], const int64_t stride[3],
            int rows, const float* cos, const float* sin, int planes, uint16_t* q, uint16_t* k, uint16_t* v) {
  const int counts[3] = {m->heads, m->kv_heads, m->kv_heads}, all = m->heads + 2 * m->kv_heads;
  scratch.reset(static_cast<int64_t>(m->threads) * all * m->dim * 4 + 64);
  float* memory = scratch.take<float>(static_cast<int64_t>(m->threads) * all * m->dim);
  const int64_t head = static_cast<int64_t>(rows) * m->dim;
  const Places to_places{cos, sin, planes, q, k, v, head, head, head};
  each_row(m->threads, rows, [&](int64_t row, int thread) {
    float* heads = memory + static_cast<int64_t>(thread) * all * m->dim;
    float* to = heads;
    for (int part = 0; part < 3; ++part) {
      const uint16_t* from = qkv[part] + row * stride[part];
      for (int i = 0; i < counts[part] * m->dim; ++i) to[i] = widen(from[i]);
      to += counts[part] * m->dim;
    }
    place_row(*m, *b, heads, static_cast<int>(row), to_places);
  });
}

void gated(const LongchatModel* m, const uint16_t* gate, const uint16_t* up, int64_t stride, int rows,
           uint16_t* out) {
  each_row(m->threads, rows, [&](int64_t row, int) {
    const uint16_t *g = gate + row * stride, *u = up + row * stride;
    uint16_t* to = out + row * m->hidden;
    if (m->gelu)
      for (int i = 0; i < m->hidden; ++i) to[i] = narrow(gelu(widen(g[i])) * widen(u[i]));
    else
      for (int i = 0; i < m->hidden; ++i) to[i] = narrow(silu(widen(g[i])) * widen(u[i]));
  });
}

// A step known beforehand lets the loop become vectors.
template <int STEP>
inline void turn_pairs(const uint16_t* q, const float* cos, const float* sin, int planes, int apart, uint16_t* to) {
  for (int i = 0; i < planes; ++i) {
    const float a = widen(q[i * STEP]), b = widen(q[i * STEP + apart]);
    to[i * STEP] = narrow(a * cos[i] - b * sin[i]);
    to[i * STEP + apart] = narrow(b * cos[i] + a * sin[i]);
  }
}

// A query as it is turned for a span, rounded as it was.
inline void turn(const uint16_t* q, const LongchatSpan& s, int row, int dim, uint16_t* to) {
  const float *cos = s.cos + static_cast<int64_t>(row) * s.planes, *sin = s.sin + static_cast<int64_t>(row) * s.planes;
  if (s.interleaved)
    turn_pairs<2>(q, cos, sin, s.planes, 1, to);
  else
    turn_pairs<1>(q, cos, sin, s.planes, s.planes, to);
  for (int i = 2 * s.planes; i < dim; ++i) to[i] = q[i];
}

}  // namespace
