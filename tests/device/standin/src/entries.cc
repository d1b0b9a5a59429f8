#include "entries.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "settings.h"

#ifndef __x86_64__
#error "the entries of kernels are written for x86-64 only"
#endif

// Every entry comes here, with the function it belongs to in r11. What may hold an argument is kept over the call, and
// the stack is left as it was found: C++ cannot say so for functions of any type. By the time the function itself runs
// nothing of this is left on the stack, so that exceptions pass by.
asm(R"(
  .text
  .p2align 4
  .hidden standin_enter
  .globl standin_enter
  .type standin_enter, @function
standin_enter:
  push %rbp
  mov %rsp, %rbp
  push %rdi
  push %rsi
  push %rdx
  push %rcx
  push %r8
  push %r9
  sub $128, %rsp
  movups %xmm0, (%rsp)
  movups %xmm1, 16(%rsp)
  movups %xmm2, 32(%rsp)
  movups %xmm3, 48(%rsp)
  movups %xmm4, 64(%rsp)
  movups %xmm5, 80(%rsp)
  movups %xmm6, 96(%rsp)
  movups %xmm7, 112(%rsp)
  mov %r11, %rsi
  call standin_before_kernel
  mov %rax, %r11
  movups (%rsp), %xmm0
  movups 16(%rsp), %xmm1
  movups 32(%rsp), %xmm2
  movups 48(%rsp), %xmm3
  movups 64(%rsp), %xmm4
  movups 80(%rsp), %xmm5
  movups 96(%rsp), %xmm6
  movups 112(%rsp), %xmm7
  add $128, %rsp
  pop %r9
  pop %r8
  pop %rcx
  pop %rdx
  pop %rsi
  pop %rdi
  pop %rbp
  jmp *%r11
  .size standin_enter, .-standin_enter
)");

extern "C" __attribute__((visibility("hidden"))) void standin_enter();

namespace standin {
namespace {

constexpr size_t kEntryBytes = 24;

unsigned char* writable(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) give_up(std::string("memory for the entries of kernels: ") + std::strerror(errno));
  return static_cast<unsigned char*>(memory);
}

}  // namespace

Entries::Entries(size_t count) : bytes_(count * kEntryBytes + 1), begin_(writable(bytes_)), next_(begin_) {}

void* Entries::into(void* function) {
  if (next_ + kEntryBytes > begin_ + bytes_) give_up("there are more kernels than entries");
  unsigned char code[kEntryBytes] = {0x49, 0xBB, 0, 0, 0, 0, 0, 0, 0, 0,   // mov $function, %r11
                                     0x49, 0xBA, 0, 0, 0, 0, 0, 0, 0, 0,   // mov $standin_enter, %r10
                                     0x41, 0xFF, 0xE2};                    // jmp *%r10
  const auto enter = reinterpret_cast<uintptr_t>(&standin_enter);
  std::memcpy(code + 2, &function, sizeof(function));
  std::memcpy(code + 12, &enter, sizeof(enter));
  std::memcpy(next_, code, kEntryBytes);
  void* entry = next_;
  next_ += kEntryBytes;
  return entry;
}

void Entries::close() {
  if (mprotect(begin_, bytes_, PROT_READ | PROT_EXEC) != 0) {
    give_up(std::string("the entries of kernels: ") + std::strerror(errno));
  }
}

}  // namespace standin
