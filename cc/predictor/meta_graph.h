// Reads the description of a SavedModel's graph.

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

// The parts of a tensorflow.MetaGraphDef that the predictor needs.
struct MetaGraph {
  std::string tensorflow_version;  // The exporter's.
  std::set<std::string> ops;       // Those that are no functions of it.
  std::map<std::string, Signature> signatures;
  // Default values of inputs that a request may omit: a serialized TensorProto,
  // by signature and input.
  std::map<std::string, std::map<std::string, std::string>> defaults;
};

// DataLoss if the bytes are no MetaGraphDef.
Result<MetaGraph> ParseMetaGraph(std::string_view bytes);

// Finds the graph with these tags in a tensorflow.SavedModel. NotFound if it
// does not have one.
Result<MetaGraph> ParseSavedModel(std::string_view bytes,
                                  const std::vector<std::string>& tags);

// The names of the ops in a tensorflow.OpList.
std::set<std::string> ParseOpNames(std::string_view op_list);

}  // namespace tfswitch

#endif  // CC_PREDICTOR_META_GRAPH_H_
