// Compiled with -mavx2 where the target has it.
#define TFSWITCH_KERNEL_NAMESPACE avx2
#include "cc/serving/row_decode.inc"
