// Names of the machine types, and the switch between the GPU build (NVRTC) and the CPU emulation (g++).
#pragma once
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#ifdef __CUDACC__
#define DEVICE __device__ __forceinline__
#define DEVICE_COLD __device__ __noinline__  // rare paths, kept out of the instructions that every call fetches
// Numbers of the head, such as `kNumRanks`, are constants on the GPU. In the emulation they are variables, so that one
// build serves all: what is made of them is a CONSTANT, and an array of so many elements has ROOM for the most.
#define CONSTANT constexpr
#define ROOM(count, most) (count)

/// The block's dynamic shared memory, 128-byte aligned (bulk copies and mbarriers want 16 and 8).
DEVICE u8* dynamic_shared() {
  extern __shared__ __align__(128) u8 bytes[];
  return bytes;
}
#else
#include "emulation.cuh"
#define DEVICE inline
#define DEVICE_COLD inline
#define CONSTANT const
#define ROOM(count, most) (most)

DEVICE u8* dynamic_shared() { return emulation::dynamic_shared; }
#endif

/// Sixteen bytes, moved by one instruction.
struct __align__(16) Vec16 {
  u32 word[4];
};
