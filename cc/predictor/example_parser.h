// Reads tf.train.Example.

#ifndef CC_PREDICTOR_EXAMPLE_PARSER_H_
#define CC_PREDICTOR_EXAMPLE_PARSER_H_

#include <string_view>

#include "tfswitch/example_reader.h"

namespace tfswitch {

// False if the bytes are no tf.train.Example.
bool ParseExample(std::string_view bytes, Features* features);

}  // namespace tfswitch

#endif  // CC_PREDICTOR_EXAMPLE_PARSER_H_
