// What a SavedModel says of its graph.

#ifndef CC_PREDICTOR_META_GRAPH_H_
#define CC_PREDICTOR_META_GRAPH_H_

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tfswitch/status.h"
#include "tfswitch/values.h"

namespace tfswitch {

// Of a tensorflow.MetaGraphDef.
struct MetaGraph {
  std::string tensorflow_version;  // That it was exported with.
  std::set<std::string> ops;       // Those that its own functions are not.
  std::map<std::string, Signature> signatures;
  // By signature and input: a serialized TensorProto for inputs that may be
  // left out.
  std::map<std::string, std::map<std::string, std::string>> defaults;
};

// DataLoss if the bytes are not of such a message.
Result<MetaGraph> ParseMetaGraph(std::string_view bytes);

// That with these tags, out of a tensorflow.SavedModel. NotFound if there is
// none.
Result<MetaGraph> ParseSavedModel(std::string_view bytes,
                                  const std::vector<std::string>& tags);

// The names of the ops of a tensorflow.OpList.
std::set<std::string> ParseOpNames(std::string_view op_list);

}  // namespace tfswitch

#endif  // CC_PREDICTOR_META_GRAPH_H_
