// The TensorFlow that this library was built against, as a mark in its bytes:
// the loader reads it from the file, because a library built for another
// TensorFlow may not open at all.

extern "C" {
__attribute__((visibility("default"),
               used)) extern const char tfswitch_built_for_tensorflow[] =
    "tfswitch_built_for_tensorflow=" TFSWITCH_TENSORFLOW_VERSION;
}
