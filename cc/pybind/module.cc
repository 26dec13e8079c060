// tfswitch._native: clusters, tables and servers for Python.
//
// A thin layer over cc/capi/tfswitch.h. Calls that may block release the GIL,
// because they wait for the network or work for a long time, and other Python
// threads must run meanwhile, for example those of a server in the same
// process.

#include <cxxabi.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cc/capi/core_loader.h"
#include "cc/capi/tfswitch.h"
#include "cc/pybind/interrupts.h"
#include "cc/pybind/status_exceptions.h"

namespace tfswitch {
namespace {

namespace py = pybind11;

// Does not set forcecast, with which NumPy would round values.
using IdArray = py::array_t<int64_t, py::array::c_style>;
using FloatArray = py::array_t<float, py::array::c_style>;

// The core's functions; set once when the module is imported.
const Tfswitch_Api* api = nullptr;

// Python runs signal handlers only in this thread.
unsigned long main_thread = 0;

// Returns 0 to continue the wait, or 1 if a handler has raised an exception.
int RunSignalHandlers() {
  if (PyThread_get_thread_ident() != main_thread) return IsOpInterrupted();
  const py::gil_scoped_acquire acquire;
  // Another call in the same method has already found an exception.
  if (HasKeptException()) return 1;
  // Also makes the calls that an interrupted op has left; see interrupts.cc.
  if (PyErr_CheckSignals() == 0 && Py_MakePendingCalls() == 0) return 0;
  KeepException();
  return 1;
}

// Releases the GIL while the object lives. If a daemon thread wants the GIL
// back while the process ends, Python ends the thread by unwinding its stack.
// That would abort the process, because destructors do not allow exceptions. So
// the thread instead waits until the process has ended, as in Python 3.14.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;
  ~GilRelease() {
    try {
      PyEval_RestoreThread(state_);
    } catch (const abi::__forced_unwind&) {
      for (;;) pause();
    }
  }

 private:
  PyThreadState* const state_;
};

// Calls a function of the C API without the GIL, and throws its error.
template <typename Function, typename... Args>
void Run(Function function, const Args&... args) {
  char error[TFSWITCH_ERROR_SIZE] = "";
  int code;
  {
    const GilRelease release;
    code = function(args..., error);
  }
  if (HasKeptException() && PyThread_get_thread_ident() == main_thread) {
    RestoreException();
    throw py::error_already_set();
  }
  if (code != 0) throw StatusError(code, error);
}

// Drops a reference without the GIL, because dropping the last one may wait for
// connections.
template <typename T>
void Release(std::shared_ptr<T>* reference) {
  std::shared_ptr<T> last = std::move(*reference);
  reference->reset();
  const GilRelease release;
  last.reset();
}

// A method of protos/tfswitch/v1/control.proto.
std::string Call(Tfswitch_Cluster* cluster, const std::string& method,
                 const std::string& request_json) {
  char* response = nullptr;
  Run(api->call, cluster, method.c_str(), request_json.c_str(), &response);
  std::string result = response != nullptr ? response : "";
  api->free_string(response);
  return result;
}

using Shape = std::vector<py::ssize_t>;

std::string ToString(const Shape& shape) {
  std::string result = "(";
  for (size_t i = 0; i < shape.size(); ++i) {
    result += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  }
  return result + (shape.size() == 1 ? ",)" : ")");
}

Shape ShapeOf(const py::array& array) {
  return Shape(array.shape(), array.shape() + array.ndim());
}

template <typename Array>
Array ToArray(const py::object& object, const char* name, const char* dtype) {
  // First lets NumPy choose the dtype, so that 1.5 in a list becomes no id.
  const py::array natural = py::array::ensure(object);
  auto array = natural ? Array::ensure(natural) : Array();
  if (!natural || !array) {
    PyErr_Clear();
    throw py::type_error(
        std::string("`") + name + "` must be a NumPy array of " + dtype +
        ". Received: " +
        (natural ? "dtype " + py::cast<std::string>(py::str(natural.dtype()))
                 : py::cast<std::string>(py::repr(object))));
  }
  return array;
}

IdArray ToIds(const py::object& object) {
  return ToArray<IdArray>(object, "ids", "int64");
}

class Table {
 public:
  Table(std::shared_ptr<Tfswitch_Cluster> cluster, const std::string& config) {
    Tfswitch_Table* opened = nullptr;
    Run(api->open_table, cluster.get(), config.c_str(), &opened);
    table_ = std::shared_ptr<Tfswitch_Table>(opened, api->close_table);
    cluster_ = std::move(cluster);
    name_ = api->table_name(opened);
    dim_ = api->table_dim(opened);
    slot_floats_ = api->table_slot_floats(opened);
    is_remote_ = api->table_is_remote(opened) != 0;
  }
  ~Table() { Close(); }
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  const std::string& name() const { return name_; }
  int dim() const { return dim_; }
  int slot_floats() const { return slot_floats_; }
  bool is_remote() const { return is_remote_; }

  int64_t Size() const {
    int64_t num_rows = 0;
    const auto table = Open();
    Run(api->table_size, table.get(), &num_rows);
    return num_rows;
  }

  py::array Pull(const py::object& ids, bool insert_missing) const {
    const auto table = Open();
    const IdArray keys = ToIds(ids);
    py::array_t<float> embeddings(RowsShape(keys, dim_));
    if (keys.size() == 0) return embeddings;
    Tfswitch_PullPart part = {};
    part.table = table.get();
    part.keys = keys.data();
    part.num_keys = static_cast<size_t>(keys.size());
    part.embeddings = embeddings.mutable_data();
    Run(api->pull, &part, 1, insert_missing ? 1 : 0, /*threads=*/nullptr);
    return embeddings;
  }

  int64_t Push(const py::object& ids, const py::object& gradients,
               float learning_rate, bool insert_missing) const {
    const auto table = Open();
    const IdArray keys = ToIds(ids);
    const FloatArray rows = ToRows(gradients, "gradients", keys, dim_);
    Tfswitch_PushPart part = {};
    part.table = table.get();
    part.keys = keys.data();
    part.num_keys = static_cast<size_t>(keys.size());
    part.gradients = rows.data();
    part.options.learning_rate = learning_rate;
    part.options.insert_missing = insert_missing ? 1 : 0;
    if (keys.size() == 0) return 0;
    Run(api->push, &part, 1, /*depth=*/0, /*threads=*/nullptr);
    return part.result.updated_rows;
  }

  void Assign(const py::object& ids, const py::object& values,
              const py::object& slots) const {
    const auto table = Open();
    const IdArray keys = ToIds(ids);
    const FloatArray rows = ToRows(values, "values", keys, dim_);
    FloatArray slot_rows;
    const float* slot_data = nullptr;
    if (!slots.is_none()) {
      slot_rows = ToRows(slots, "slots", keys, slot_floats_);
      slot_data = slot_rows.data();
    }
    if (keys.size() == 0) return;
    Run(api->assign, table.get(), keys.data(), keys.size(), rows.data(),
        slot_data);
  }

  // Sets rows that do not exist yet, and returns how many these were.
  int64_t AssignMissing(const py::object& ids, const py::object& values) const {
    const auto table = Open();
    const IdArray keys = ToIds(ids);
    const FloatArray rows = ToRows(values, "values", keys, dim_);
    int64_t assigned_rows = 0;
    Run(api->assign_missing, table.get(), keys.data(), keys.size(), rows.data(),
        &assigned_rows);
    return assigned_rows;
  }

  // Returns (num_ids x 5 floats, num_ids states); see cc/capi/tfswitch.h.
  py::tuple ReadUsage(const py::object& ids) const {
    const auto table = Open();
    const IdArray keys = ToIds(ids);
    py::array_t<float> usage(
        std::vector<py::ssize_t>{keys.size(), py::ssize_t{5}});
    py::array_t<uint8_t> states(keys.size());
    if (keys.size() > 0) {
      Run(api->read_usage, table.get(), keys.data(), keys.size(),
          usage.mutable_data(), states.mutable_data());
    }
    return py::make_tuple(usage, states);
  }

  // Calls a method of the cluster, which the table keeps open.
  std::string Call(const std::string& method,
                   const std::string& request_json) const {
    const auto table = Open();
    const auto cluster = cluster_;
    return tfswitch::Call(cluster.get(), method, request_json);
  }

  IdArray DenseKeys(size_t num_blocks) const {
    const auto table = Open();
    IdArray keys(static_cast<py::ssize_t>(num_blocks));
    api->dense_keys(table.get(), num_blocks, keys.mutable_data());
    return keys;
  }

  int64_t Erase(const py::object& ids) const {
    const auto table = Open();
    const IdArray keys = ToIds(ids);
    int64_t erased_rows = 0;
    if (keys.size() == 0) return 0;
    Run(api->erase, table.get(), keys.data(), keys.size(), &erased_rows);
    return erased_rows;
  }

  py::tuple ExportRows(bool with_slots) const {
    const auto table = Open();
    const auto expected = static_cast<size_t>(Size());
    const auto dim = static_cast<size_t>(dim_);
    const auto slot_floats = static_cast<size_t>(with_slots ? slot_floats_ : 0);
    std::vector<int64_t> keys;
    std::vector<float> embeddings;
    std::vector<float> slots;
    keys.reserve(expected);
    embeddings.reserve(expected * dim);
    slots.reserve(expected * slot_floats);
    VisitRuns(table.get(), with_slots, [&](const Rows& run) {
      const size_t n = run.num_rows;
      keys.insert(keys.end(), run.keys, run.keys + n);
      embeddings.insert(embeddings.end(), run.embeddings,
                        run.embeddings + n * dim);
      if (run.slots == nullptr) return;
      slots.insert(slots.end(), run.slots, run.slots + n * slot_floats);
    });
    const auto num_rows = static_cast<py::ssize_t>(keys.size());
    py::object slot_rows = py::none();
    if (with_slots) {
      slot_rows = ToArray(std::move(slots), {num_rows, slot_floats_});
    }
    return py::make_tuple(ToArray(std::move(keys), {num_rows}),
                          ToArray(std::move(embeddings), {num_rows, dim_}),
                          slot_rows);
  }

  // Calls visit(ids, values, slots or None) with copies of some rows at a time.
  // If visit raises an exception, the export ends and the exception is raised.
  void VisitRows(bool with_slots, const py::function& visit) const {
    const auto table = Open();
    VisitRuns(table.get(), with_slots, [&](const Rows& run) {
      const py::gil_scoped_acquire acquire;
      const auto n = static_cast<py::ssize_t>(run.num_rows);
      py::object slot_rows = py::none();
      if (run.slots != nullptr) {
        slot_rows = py::array_t<float>(Shape{n, slot_floats_}, run.slots);
      }
      visit(py::array_t<int64_t>(Shape{n}, run.keys),
            py::array_t<float>(Shape{n, dim_}, run.embeddings), slot_rows);
    });
  }

  void Close() {
    if (table_ != nullptr) Release(&table_);
    if (cluster_ != nullptr) Release(&cluster_);
  }

 private:
  struct Rows {
    const int64_t* keys;
    const float* embeddings;
    const float* slots;  // Null without slots.
    size_t num_rows;
  };

  // Calls visit(rows) with some rows at a time, without the GIL. If visit
  // throws an exception, the export ends and the exception is thrown.
  template <typename Visit>
  static void VisitRuns(Tfswitch_Table* table, bool with_slots,
                        const Visit& visit) {
    struct Context {
      const Visit& visit;
      std::exception_ptr thrown;
    } context = {visit, nullptr};
    const auto visit_run = [](void* opaque, const int64_t* keys,
                              const float* embeddings, const float* slots,
                              size_t num_rows) {
      auto* self = static_cast<Context*>(opaque);
      // No exception may cross the C boundary.
      try {
        self->visit({keys, embeddings, slots, num_rows});
      } catch (...) {
        self->thrown = std::current_exception();
        return 1;
      }
      return 0;
    };
    try {
      Run(api->export_rows, table, with_slots ? 1 : 0, visit_run, &context);
    } catch (const StatusError&) {
      if (context.thrown != nullptr) std::rethrow_exception(context.thrown);
      throw;
    }
  }

  // Hands the vector's memory to NumPy.
  template <typename T>
  static py::array_t<T> ToArray(std::vector<T> values, const Shape& shape) {
    auto* kept = new std::vector<T>(std::move(values));
    py::capsule owner(kept,
                      [](void* p) { delete static_cast<std::vector<T>*>(p); });
    return py::array_t<T>(shape, kept->data(), owner);
  }

  // Holds the table for one call, so that close() in another thread does not
  // free it meanwhile.
  std::shared_ptr<Tfswitch_Table> Open() const {
    if (table_ == nullptr) {
      throw std::runtime_error("table '" + name_ + "' is closed");
    }
    return table_;
  }

  static Shape RowsShape(const IdArray& ids, int row_floats) {
    Shape shape = ShapeOf(ids);
    shape.push_back(row_floats);
    return shape;
  }

  FloatArray ToRows(const py::object& object, const char* name,
                    const IdArray& ids, int row_floats) const {
    FloatArray rows = tfswitch::ToArray<FloatArray>(object, name, "float32");
    const Shape expected = RowsShape(ids, row_floats);
    if (ShapeOf(rows) != expected) {
      throw py::value_error("table '" + name_ + "': expected `" + name +
                            "` of shape " + ToString(expected) +
                            " for ids of shape " + ToString(ShapeOf(ids)) +
                            ", got " + ToString(ShapeOf(rows)));
    }
    return rows;
  }

  // Null once closed. Guarded by the GIL.
  std::shared_ptr<Tfswitch_Table> table_;
  std::shared_ptr<Tfswitch_Cluster> cluster_;
  // Constant after construction.
  std::string name_;
  int dim_ = 0;
  int slot_floats_ = 0;
  bool is_remote_ = false;
};

// ca, cert, key, server_name.
using TlsTexts = std::array<std::string, 4>;

// Points into `texts`.
Tfswitch_TlsFiles ToTlsFiles(const std::optional<TlsTexts>& texts) {
  if (!texts.has_value()) return {};
  const TlsTexts& t = *texts;
  return {t[0].c_str(), t[1].c_str(), t[2].c_str(), t[3].c_str()};
}

class Cluster {
 public:
  Cluster(const std::string& address, double timeout,
          const std::optional<TlsTexts>& tls, const std::string& token,
          const std::string& token_file)
      : address_(address) {
    Tfswitch_Cluster* opened = nullptr;
    const Tfswitch_TlsFiles files = ToTlsFiles(tls);
    const Tfswitch_Credentials credentials = {
        tls.has_value() ? &files : nullptr, token.c_str(), token_file.c_str()};
    Run(api->open_cluster, address.c_str(), timeout, &credentials, /*id=*/0,
        &opened);
    cluster_ = std::shared_ptr<Tfswitch_Cluster>(opened, api->close_cluster);
    id_ = static_cast<int64_t>(api->cluster_id(opened));
    num_shards_ = api->cluster_num_shards(opened);
    is_remote_ = api->cluster_is_remote(opened) != 0;
  }
  ~Cluster() { Close(); }
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  const std::string& address() const { return address_; }
  int64_t id() const { return id_; }
  int num_shards() const { return num_shards_; }
  bool is_remote() const { return is_remote_; }

  std::string Call(const std::string& method,
                   const std::string& request_json) const {
    return tfswitch::Call(Open().get(), method, request_json);
  }

  void EndStep(double weight) const {
    const auto cluster = Open();
    int64_t round;
    Run(api->end_step, cluster.get(), weight, &round);
  }

  void AdvanceWorkItem(const std::string& queue, int64_t epoch, int64_t index,
                       int64_t offset) const {
    const auto cluster = Open();
    Run(api->advance_work_item, cluster.get(), queue.c_str(), epoch, index,
        offset);
  }

  int WorkItemState(const std::string& queue, int64_t epoch,
                    int64_t index) const {
    const auto cluster = Open();
    int32_t state = TFSWITCH_WORK_ITEM_LOST;
    Run(api->work_item_state, cluster.get(), queue.c_str(), epoch, index,
        &state);
    return state;
  }

  std::unique_ptr<Table> OpenTable(const std::string& config) const {
    return std::make_unique<Table>(Open(), config);
  }

  void Close() {
    if (cluster_ != nullptr) Release(&cluster_);
  }

 private:
  std::shared_ptr<Tfswitch_Cluster> Open() const {
    if (cluster_ == nullptr) {
      throw std::runtime_error("cluster '" + address_ + "' is closed");
    }
    return cluster_;
  }

  // Null once closed. Guarded by the GIL.
  std::shared_ptr<Tfswitch_Cluster> cluster_;
  // Constant after construction.
  const std::string address_;
  int64_t id_ = 0;
  int num_shards_ = 0;
  bool is_remote_ = false;
};

class Server {
 public:
  Server(const std::string& address, uint32_t shard_index, uint32_t num_shards,
         int32_t num_threads, uint64_t max_message_bytes,
         const std::vector<std::string>& limits,
         const std::optional<std::string>& checkpoint_root,
         const std::optional<TlsTexts>& tls,
         const std::optional<std::string>& token_file, bool is_insecure) {
    std::vector<const char*> limit_texts;
    limit_texts.reserve(limits.size());
    for (const std::string& limit : limits) {
      limit_texts.push_back(limit.c_str());
    }
    Tfswitch_ServerOptions options = {};
    options.limits = limit_texts.data();
    options.num_limits = limit_texts.size();
    options.address = address.c_str();
    options.shard_index = shard_index;
    options.num_shards = num_shards;
    options.num_threads = num_threads;
    options.max_message_bytes = max_message_bytes;
    if (checkpoint_root.has_value()) {
      options.checkpoint_root = checkpoint_root->c_str();
    }
    const Tfswitch_TlsFiles files = ToTlsFiles(tls);
    if (tls.has_value()) options.tls = &files;
    if (token_file.has_value()) options.token_file = token_file->c_str();
    options.is_insecure = is_insecure ? 1 : 0;
    Tfswitch_Server* started = nullptr;
    Run(api->start_server, &options, &started);
    server_ = std::shared_ptr<Tfswitch_Server>(started, api->delete_server);
    address_ = api->server_address(started);
  }
  ~Server() { Release(&server_); }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  const std::string& address() const { return address_; }

  void Stop(double grace) const {
    const GilRelease release;
    api->stop_server(server_.get(), grace);
  }

 private:
  std::shared_ptr<Tfswitch_Server> server_;
  std::string address_;
};

// NOLINTNEXTLINE(performance-unnecessary-value-param): pybind11's signature.
void TranslateStatusError(std::exception_ptr exception) {
  try {
    if (exception) std::rethrow_exception(exception);
  } catch (const StatusError& e) {
    const std::string message = e.what();
    // The message may end in the middle of a character: replaces such bytes.
    const py::object text =
        py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(
            message.data(), static_cast<py::ssize_t>(message.size()),
            "replace"));
    if (text) PyErr_SetObject(ExceptionOf(e.code()), text.ptr());
  }
}

void DefineClasses(py::module_& m) {
  // Registered with module_local, because TensorFlow's own pybind11 modules are
  // in the same process.
  py::class_<Cluster>(m, "Cluster", py::module_local())
      .def(py::init<const std::string&, double, const std::optional<TlsTexts>&,
                    const std::string&, const std::string&>(),
           py::arg("address"), py::arg("timeout"), py::arg("tls") = py::none(),
           py::arg("token") = "", py::arg("token_file") = "")
      .def_property_readonly("address", &Cluster::address)
      .def_property_readonly("id", &Cluster::id)
      .def_property_readonly("num_shards", &Cluster::num_shards)
      .def_property_readonly("is_remote", &Cluster::is_remote)
      .def("call", &Cluster::Call, py::arg("method"), py::arg("request_json"))
      .def("end_step", &Cluster::EndStep, py::arg("weight"))
      .def("advance_work_item", &Cluster::AdvanceWorkItem, py::arg("queue"),
           py::arg("epoch"), py::arg("index"), py::arg("offset"))
      .def("work_item_state", &Cluster::WorkItemState, py::arg("queue"),
           py::arg("epoch"), py::arg("index"))
      .def("open_table", &Cluster::OpenTable, py::arg("config_json"))
      .def("close", &Cluster::Close);

  py::class_<Table>(m, "Table", py::module_local())
      .def_property_readonly("name", &Table::name)
      .def_property_readonly("dim", &Table::dim)
      .def_property_readonly("slot_floats", &Table::slot_floats)
      .def_property_readonly("is_remote", &Table::is_remote)
      .def("size", &Table::Size)
      .def("pull", &Table::Pull, py::arg("ids"), py::arg("insert_missing"))
      .def("push", &Table::Push, py::arg("ids"), py::arg("gradients"),
           py::arg("learning_rate"), py::arg("insert_missing"))
      .def("assign", &Table::Assign, py::arg("ids"), py::arg("values"),
           py::arg("slots") = py::none())
      .def("assign_missing", &Table::AssignMissing, py::arg("ids"),
           py::arg("values"))
      .def("dense_keys", &Table::DenseKeys, py::arg("num_blocks"))
      .def("erase", &Table::Erase, py::arg("ids"))
      .def("call", &Table::Call, py::arg("method"), py::arg("request_json"))
      .def("read_usage", &Table::ReadUsage, py::arg("ids"))
      .def("export_rows", &Table::ExportRows, py::arg("with_slots"))
      .def("visit_rows", &Table::VisitRows, py::arg("with_slots"),
           py::arg("visit"))
      .def("close", &Table::Close);

  py::class_<Server>(m, "Server", py::module_local())
      .def(py::init<const std::string&, uint32_t, uint32_t, int32_t, uint64_t,
                    const std::vector<std::string>&,
                    const std::optional<std::string>&,
                    const std::optional<TlsTexts>&,
                    const std::optional<std::string>&, bool>(),
           py::arg("address"), py::arg("shard_index"), py::arg("num_shards"),
           py::arg("num_threads") = 0, py::arg("max_message_bytes") = 0,
           py::arg("limits") = std::vector<std::string>(),
           py::arg("checkpoint_root") = py::none(), py::arg("tls") = py::none(),
           py::arg("token_file") = py::none(), py::arg("is_insecure") = false)
      .def_property_readonly("address", &Server::address)
      .def("stop", &Server::Stop, py::arg("grace"));
}

PYBIND11_MODULE(_native, m) {
  m.doc() = "Clusters, tables and servers of the tfswitch core library.";

  std::string load_error;
  api = OpenCore(&load_error);
  if (api == nullptr) throw py::import_error(load_error);
  py::register_local_exception_translator(TranslateStatusError);
  main_thread = py::cast<unsigned long>(
      py::module_::import("threading").attr("main_thread")().attr("ident"));
  api->set_interrupt_check(RunSignalHandlers);

  m.def("version", [] { return std::string(api->version()); });
  m.def("check_process", [] {
    // Pulls no ids: this fails only if every call would fail.
    Run(api->pull, /*parts=*/nullptr, /*num_parts=*/0,
        /*insert_missing=*/0, /*threads=*/nullptr);
  });
  m.def(
      "call",
      [](const std::string& method, const std::string& request_json) {
        return Call(/*cluster=*/nullptr, method, request_json);
      },
      py::arg("method"), py::arg("request_json"));
  m.attr("api_version") = api->api_version;
  m.attr("work_item_lost") = TFSWITCH_WORK_ITEM_LOST;
  m.attr("work_item_in_step") = TFSWITCH_WORK_ITEM_IN_STEP;

  DefineClasses(m);
}

}  // namespace
}  // namespace tfswitch
