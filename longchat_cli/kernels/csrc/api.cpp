// The C interface: the widest instructions this CPU has.
#include <string.h>

#include "isa.h"
#include "threads.h"

namespace longchat {
namespace {

struct Choice {
  const char* name;
  const Isa* isa;
};

Choice widest() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16"))
    return {"avx512", &kAvx512};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {"avx2", &kAvx2};
#elif defined(__ARM_FEATURE_DOTPROD)
  return {"neon", &kPortable};
#endif
  return {"portable", &kPortable};
}

Choice chosen = widest();

}  // namespace
}  // namespace longchat

using longchat::chosen;
using longchat::tried;

int longchat_abi() { return 10; }

const char* longchat_isa() { return chosen.name; }

int longchat_use(const char* isa) {
  const longchat::Choice best = longchat::widest();
  if (!strcmp(isa, best.name))
    chosen = best;
  else if (!strcmp(isa, "portable"))
    chosen = {"portable", &longchat::kPortable};
#if defined(__x86_64__)
  else if (!strcmp(isa, "avx2") && !strcmp(best.name, "avx512"))
    chosen = {"avx2", &longchat::kAvx2};
#endif
  else
    return 0;
  return 1;
}

int longchat_logits(const LongchatHead* w, const float* norm, float eps, const float* x, float* y, int rows,
                    int threads) {
  return tried(chosen.isa->logits, w, norm, eps, x, y, rows, threads);
}

int longchat_enter(const LongchatModel* m, const LongchatBlock* b, const float* x, int rows, const float* cos,
                   const float* sin, int planes, uint16_t* q, uint16_t* k, uint16_t* v) {
  return tried(chosen.isa->enter, m, b, x, rows, cos, sin, planes, q, k, v);
}

int longchat_leave(const LongchatModel* m, const LongchatBlock* b, float* x, int rows, const uint16_t* out,
                   int64_t out_head, int64_t out_row) {
  return tried(chosen.isa->leave, m, b, x, rows, out, out_head, out_row);
}

int longchat_attend(const LongchatAttention* a) { return tried(chosen.isa->attend, a); }

int longchat_step(const LongchatStep* s) { return tried(chosen.isa->step, s); }

void longchat_add_norm(float* x, const uint16_t* add, const float* after, const float* weight, uint16_t* out,
                       int rows, int width, float eps, int threads) {
  chosen.isa->add_norm(x, add, after, weight, out, rows, width, eps, threads);
}

int longchat_rotate(const LongchatModel* m, const LongchatBlock* b, const uint16_t* const qkv[3],
                    const int64_t stride[3], int rows, const float* cos, const float* sin, int planes,
                    uint16_t* q, uint16_t* k, uint16_t* v) {
  return tried(chosen.isa->rotate, m, b, qkv, stride, rows, cos, sin, planes, q, k, v);
}

void longchat_gated(const LongchatModel* m, const uint16_t* gate, const uint16_t* up, int64_t stride, int rows,
                    uint16_t* out) {
  chosen.isa->gated(m, gate, up, stride, rows, out);
}

void longchat_gather(const char* x, int64_t head, int64_t entry, const int64_t* index, char* to,
                     int64_t to_head, int heads, int64_t n, int64_t bytes, int threads) {
  longchat::parallel(threads, [&](longchat::Team& team, int) {
    int64_t begin, end;
    while (team.take(0, heads * n, 256, &begin, &end))
      for (int64_t i = begin; i < end; ++i) {
        const int64_t of = i / n;
        if (i + 16 < end) __builtin_prefetch(x + (i + 16) / n * head + index[i + 16] * entry);
        memcpy(to + of * to_head + i % n * bytes, x + of * head + index[i] * entry, bytes);
      }
  });
}
