#include "machine/cpu.h"

#include <cstdint>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>

#if NXD_X86
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace nxd {
namespace {

constexpr const char* kNames[] = {"portable", "avx2", "avx512", "avx512_bf16", "amx_bf16"};

#if NXD_X86

struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned part) {
  Registers r;
  if (!__get_cpuid_count(leaf, part, &r.a, &r.b, &r.c, &r.d)) {
    r = Registers{};
  }
  return r;
}

bool bit(unsigned value, int place) { return (value >> place) & 1; }

// The register state that the operating system saves at a task switch.
uint64_t saved_state() {
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// On Linux a process must request the tile registers (arch_prctl ARCH_REQ_XCOMP_PERM of XTILEDATA).
bool tiles_permitted() {
#if defined(__linux__)
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}

Cpu detect() {
  const Registers one = cpuid(1, 0), seven = cpuid(7, 0), more = cpuid(7, 1);
  const bool osxsave = bit(one.c, 27);
  const uint64_t saved = osxsave ? saved_state() : 0;
  const bool avx2 = (saved & 0x6) == 0x6 && bit(seven.b, 5) && bit(one.c, 12) && bit(one.c, 29) && bit(seven.b, 8);
  if (!avx2) return Cpu::portable;
  const bool avx512 = (saved & 0xe0) == 0xe0 && bit(seven.b, 16) && bit(seven.b, 17) && bit(seven.b, 30) &&
                      bit(seven.b, 31);
  if (!avx512) return Cpu::avx2;
  if (!bit(more.a, 5) || !bit(seven.c, 11)) return Cpu::avx512;
  const bool amx = (saved & 0x60000) == 0x60000 && bit(seven.d, 22) && bit(seven.d, 24) && tiles_permitted();
  return amx ? Cpu::amx_bf16 : Cpu::avx512_bf16;
}

// AMD family 19h with the bfloat16 dot product: Zen 4.
bool reads_ahead() {
  const Registers vendor = cpuid(0, 0);
  const bool amd = vendor.b == 0x68747541 && vendor.d == 0x69746e65 && vendor.c == 0x444d4163;  // AuthenticAMD
  const unsigned version = cpuid(1, 0).a;
  return amd && (version >> 8 & 0xf) + (version >> 20 & 0xff) == 0x19 && bit(cpuid(7, 1).a, 5);
}

#else

Cpu detect() { return Cpu::portable; }

bool reads_ahead() { return false; }

#endif

Cpu capped(Cpu found) {
  const char* wanted = std::getenv("NXD_INFER_CPU_LEVEL");
  if (wanted == nullptr || *wanted == '\0') return found;
  for (int level = 0; level < 5; level++) {
    if (std::string(wanted) == kNames[level]) {
      return level < static_cast<int>(found) ? static_cast<Cpu>(level) : found;
    }
  }
  throw std::runtime_error(
      "nxd: NXD_INFER_CPU_LEVEL='" + std::string(wanted) +
      "' is not one of portable, avx2, avx512, avx512_bf16, amx_bf16");
}

} // namespace

Cpu cpu() {
  static const Cpu level = capped(detect());
  return level;
}

bool asks() {
  static const bool answer = [] {
    const char* wanted = std::getenv("NXD_INFER_CPU_ASKS");
    if (wanted == nullptr || *wanted == '\0') return !reads_ahead();
    if (std::string(wanted) != "0" && std::string(wanted) != "1") {
      throw std::runtime_error("nxd: NXD_INFER_CPU_ASKS='" + std::string(wanted) + "' is neither 0 nor 1");
    }
    return *wanted == '1';
  }();
  return answer;
}

} // namespace nxd

// The level's name, or a message beginning with "nxd: ": its caller, ctypes, cannot take an exception.
extern "C" __attribute__((visibility("default"))) const char* nxd_cpu_level() {
  try {
    return nxd::kNames[static_cast<int>(nxd::cpu())];
  } catch (const std::exception& error) {
    static thread_local std::string message;
    message = error.what();
    return message.c_str();
  }
}
