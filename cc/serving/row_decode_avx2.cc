// Compiled with -mavx2 if the target has it.
#define TFSWITCH_KERNEL_NAMESPACE avx2
#include "cc/serving/row_decode.inc"
