// What many rows need, with tile instructions (AMX, bfloat16): attention, and the products of a layer.
#include <stdlib.h>
#include <string.h>

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

constexpr int kRowBlock = 32;  // rows that two tiles hold

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

inline int up(int n, int step) { return (n + step - 1) / step * step; }

}  // namespace

#include "tiles_attention.inl"
#include "tiles_products.inl"

namespace {

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
int longchat_attend_many(const LongchatAttention* a) { return longchat::tried(attend_many, a); }
int longchat_enter_many(const LongchatModel* m, const LongchatBlock* b, const float* x, int rows, const float* cos,
                        const float* sin, int planes, uint16_t* q, uint16_t* k, uint16_t* v) {
  return longchat::tried(enter_many, m, b, x, rows, cos, sin, planes, q, k, v);
}
int longchat_leave_many(const LongchatModel* m, const LongchatBlock* b, float* x, int rows, const uint16_t* out,
                        int64_t out_head, int64_t out_row) {
  return longchat::tried(leave_many, m, b, x, rows, out, out_head, out_row);
}

#else

int longchat_attends_many() { return 0; }
int longchat_attend_many(const LongchatAttention*) { return 1; }
int longchat_enter_many(const LongchatModel*, const LongchatBlock*, const float*, int, const float*, const float*, int,
                        uint16_t*, uint16_t*, uint16_t*) {
  return 1;
}
int longchat_leave_many(const LongchatModel*, const LongchatBlock*, float*, int, const uint16_t*, int64_t, int64_t) {
  return 1;
}

#endif
