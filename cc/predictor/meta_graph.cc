// The field numbers are those of TensorFlow's .proto files. Functions call each
// other to a fixed depth, even for malicious bytes.

#include "cc/predictor/meta_graph.h"

#include <utility>

#include "cc/predictor/errors.h"
#include "cc/predictor/wire.h"

namespace tfswitch {
namespace {

// The dimensions of a TensorShapeProto.
bool ReadShape(std::string_view bytes,
               std::optional<std::vector<int64_t>>* shape) {
  std::vector<int64_t> dims;
  bool has_rank = true;
  WireReader fields(bytes);
  while (fields.Next()) {
    if (fields.IsBytes(2)) {
      int64_t& size = dims.emplace_back(0);
      WireReader dim(fields.bytes());
      while (dim.Next()) {
        if (dim.IsInteger(1)) size = static_cast<int64_t>(dim.integer());
      }
      if (!dim.ok()) return false;
      if (size < 0) size = -1;
    }
    if (fields.IsInteger(3)) has_rank = fields.integer() == 0;
  }
  shape->reset();
  if (has_rank) *shape = std::move(dims);
  return fields.ok();
}

// A TensorInfo.
bool ReadSpec(std::string_view bytes, TensorSpec* spec) {
  spec->shape.emplace();
  WireReader fields(bytes);
  while (fields.Next()) {
    if (fields.IsBytes(1)) spec->graph_name = fields.bytes();
    // One of several parts.
    if (fields.IsBytes(4) || fields.IsBytes(5)) spec->graph_name.clear();
    if (fields.IsInteger(2)) {
      spec->dtype = static_cast<DataType>(fields.integer());
    }
    if (fields.IsBytes(3) && !ReadShape(fields.bytes(), &spec->shape)) {
      return false;
    }
  }
  return fields.ok();
}

// A SignatureDef.
bool ReadSignature(std::string_view bytes, Signature* signature,
                   std::map<std::string, std::string>* defaults) {
  signature->def = bytes;
  WireReader fields(bytes);
  while (fields.Next()) {
    bool parsed = true;
    if (fields.IsBytes(1) || fields.IsBytes(2)) {
      auto& specs = fields.IsBytes(1) ? signature->inputs : signature->outputs;
      parsed =
          ReadEntry(fields.bytes(), [&](const std::string& name, auto value) {
            return ReadSpec(value, &specs[name]);
          });
    } else if (fields.IsBytes(4)) {
      parsed =
          ReadEntry(fields.bytes(), [&](const std::string& name, auto value) {
            (*defaults)[name] = value;
            return true;
          });
    }
    if (!parsed) return false;
  }
  return fields.ok();
}

// The last field of that number.
bool ReadText(std::string_view bytes, uint32_t number, std::string* text) {
  WireReader fields(bytes);
  while (fields.Next()) {
    if (fields.IsBytes(number)) *text = fields.bytes();
  }
  return fields.ok();
}

// The op of a NodeDef.
bool ReadNode(std::string_view bytes, std::set<std::string>* ops) {
  std::string op;
  if (!ReadText(bytes, 2, &op)) return false;
  ops->insert(std::move(op));
  return true;
}

// A FunctionDefLibrary.
bool ReadLibrary(std::string_view bytes, std::set<std::string>* ops,
                 std::set<std::string>* names) {
  WireReader fields(bytes);
  while (fields.Next()) {
    if (!fields.IsBytes(1)) continue;
    WireReader function(fields.bytes());
    while (function.Next()) {
      bool parsed = true;
      if (function.IsBytes(1)) {
        std::string name;
        parsed = ReadText(function.bytes(), 1, &name);
        names->insert(std::move(name));
      } else if (function.IsBytes(3)) {
        parsed = ReadNode(function.bytes(), ops);
      }
      if (!parsed) return false;
    }
    if (!function.ok()) return false;
  }
  return fields.ok();
}

// The ops of a GraphDef.
bool ReadOps(std::string_view bytes, std::set<std::string>* ops) {
  std::set<std::string> functions;
  WireReader fields(bytes);
  while (fields.Next()) {
    if (fields.IsBytes(1) && !ReadNode(fields.bytes(), ops)) return false;
    if (fields.IsBytes(2) && !ReadLibrary(fields.bytes(), ops, &functions)) {
      return false;
    }
  }
  for (const std::string& name : functions) ops->erase(name);
  return fields.ok();
}

bool ReadMetaGraph(std::string_view bytes, MetaGraph* graph) {
  WireReader fields(bytes);
  while (fields.Next()) {
    bool parsed = true;
    if (fields.IsBytes(1)) {
      parsed = ReadText(fields.bytes(), 5, &graph->tensorflow_version);
    } else if (fields.IsBytes(2)) {
      parsed = ReadOps(fields.bytes(), &graph->ops);
    } else if (fields.IsBytes(5)) {
      parsed =
          ReadEntry(fields.bytes(), [&](const std::string& name, auto value) {
            return ReadSignature(value, &graph->signatures[name],
                                 &graph->defaults[name]);
          });
    }
    if (!parsed) return false;
  }
  return fields.ok();
}

// The tags of a MetaGraphDef.
bool ReadTags(std::string_view bytes, std::set<std::string>* tags) {
  WireReader fields(bytes);
  while (fields.Next()) {
    if (!fields.IsBytes(1)) continue;
    WireReader info(fields.bytes());
    while (info.Next()) {
      if (info.IsBytes(4)) tags->emplace(info.bytes());
    }
    if (!info.ok()) return false;
  }
  return fields.ok();
}

Status Damaged(const char* message) {
  return Error(StatusCode::kDataLoss, "the bytes are no tensorflow.", message);
}

}  // namespace

Result<MetaGraph> ParseMetaGraph(std::string_view bytes) {
  MetaGraph graph;
  if (!ReadMetaGraph(bytes, &graph)) return Damaged("MetaGraphDef");
  return graph;
}

Result<MetaGraph> ParseSavedModel(std::string_view bytes,
                                  const std::vector<std::string>& tags) {
  const std::set<std::string> wanted(tags.begin(), tags.end());
  WireReader fields(bytes);
  while (fields.Next()) {
    if (!fields.IsBytes(2)) continue;
    std::set<std::string> found;
    if (!ReadTags(fields.bytes(), &found)) return Damaged("MetaGraphDef");
    if (found == wanted) return ParseMetaGraph(fields.bytes());
  }
  if (!fields.ok()) return Damaged("SavedModel");
  return Error(StatusCode::kNotFound, "no graph has these tags");
}

std::set<std::string> ParseOpNames(std::string_view op_list) {
  std::set<std::string> names;
  WireReader fields(op_list);
  while (fields.Next()) {
    std::string name;
    if (fields.IsBytes(1) && ReadText(fields.bytes(), 1, &name)) {
      names.insert(std::move(name));
    }
  }
  return names;
}

}  // namespace tfswitch
