// Memory in large pages: what is read whole for every token is read twice as fast where the processor needs not
// look up every fourth kilobyte. Blocks are cut from slabs, whose pages become real when they are first written.
#include <iterator>
#include <map>
#include <mutex>

#include "native.h"

#if defined(__linux__)
#include <sys/mman.h>

namespace {

constexpr int64_t kSlab = 64 << 20, kPage = 2 << 20, kGrain = 256;

struct Slab {
  int64_t size, used;  // what lies before `used` was given away once: its pages are real
  std::map<int64_t, int64_t> gaps;  // sizes, by where they begin
};

std::mutex one_call;
auto* slabs = new std::map<char*, Slab>;  // not destroyed: blocks may outlive what ends before the process

int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// A block that ends before `limit`.
char* cut(char* at, Slab& slab, int64_t bytes, int64_t limit) {
  for (auto gap = slab.gaps.begin(); gap != slab.gaps.end(); ++gap) {
    const auto [begin, size] = *gap;
    if (size < bytes || begin + bytes > limit) continue;
    slab.gaps.erase(gap);
    if (begin + bytes > slab.used) slab.used = begin + bytes;
    if (size > bytes) slab.gaps.emplace(begin + bytes, size - bytes);
    return at + begin;
  }
  return nullptr;
}

char* new_slab(int64_t size) {
  void* found = mmap(nullptr, size + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return nullptr;
  char *begin = static_cast<char*>(found), *at = reinterpret_cast<char*>(up(reinterpret_cast<int64_t>(found), kPage));
  if (at > begin) munmap(begin, at - begin);
  if (at < begin + kPage) munmap(at + size, begin + kPage - at);
  madvise(at, size, MADV_HUGEPAGE);
  return at;
}

}  // namespace

char* longchat_take(int64_t bytes) {
  bytes = up(bytes, kGrain);
  std::lock_guard<std::mutex> lock(one_call);
  for (auto& [at, slab] : *slabs)
    if (char* found = cut(at, slab, bytes, slab.used)) return found;
  for (auto& [at, slab] : *slabs)
    if (char* found = cut(at, slab, bytes, slab.size)) return found;
  const int64_t size = up(bytes > kSlab ? bytes : kSlab, kPage);
  char* at = new_slab(size);
  if (!at) return nullptr;
  Slab& slab = slabs->emplace(at, Slab{size, 0, {{0, size}}}).first->second;
  return cut(at, slab, bytes, size);
}

void longchat_give(char* block, int64_t bytes) {
  bytes = up(bytes, kGrain);
  std::lock_guard<std::mutex> lock(one_call);
  const auto found = std::prev(slabs->upper_bound(block));
  auto& [at, slab] = *found;
  auto gap = slab.gaps.emplace(block - at, bytes).first;
  const auto next = std::next(gap);
  if (next != slab.gaps.end() && gap->first + gap->second == next->first) {
    gap->second += next->second;
    slab.gaps.erase(next);
  }
  if (gap != slab.gaps.begin()) {
    const auto before = std::prev(gap);
    if (before->first + before->second == gap->first) {
      before->second += gap->second;
      slab.gaps.erase(gap);
      gap = before;
    }
  }
  if (gap->second == slab.size) {
    munmap(at, slab.size);
    slabs->erase(found);
  }
}

#else

char* longchat_take(int64_t) { return nullptr; }
void longchat_give(char*, int64_t) {}

#endif
