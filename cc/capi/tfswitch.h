// The only header that crosses from the core library into code compiled against
// TensorFlow or Python. Conventions:
//
//   - Only C types cross. TensorFlow carries its own Abseil and protobuf, and a
//     type shared by both sides would have two definitions.
//   - libtfswitch_core.so exports one symbol, Tfswitch_GetApi. Open the library
//     with OpenCore() of cc/capi/core_loader.h, never by linking to it. A
//     program that has loaded an op library finds the symbol there too.
//   - Functions that can fail return 0 or an absl::StatusCode value, and write
//     to `error` a message that ends with NUL, cut to TFSWITCH_ERROR_SIZE.
//     They never throw.
//   - The caller owns every buffer it passes; nothing of it is retained after
//     the call returns. Strings that the core returns are freed with
//     free_string.
//   - Every function may be called from any thread, and none needs the GIL.

#ifndef TFSWITCH_CC_CAPI_TFSWITCH_H_
#define TFSWITCH_CC_CAPI_TFSWITCH_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Increases when Tfswitch_Api changes. New functions are appended at its end.
// Callers check this number, because the struct of an older core is shorter.
#define TFSWITCH_API_VERSION 17
#define TFSWITCH_ERROR_SIZE 2048
// The most parts of one call of pull or push.
#define TFSWITCH_MAX_PARTS 256

// The states of a work item, as one worker sees it: the worker has lost or
// finished it; the worker holds it; the worker holds it, and a step that has
// not ended has advanced it.
#define TFSWITCH_WORK_ITEM_LOST 0
#define TFSWITCH_WORK_ITEM_OWN 1
#define TFSWITCH_WORK_ITEM_IN_STEP 2

typedef struct Tfswitch_Cluster Tfswitch_Cluster;
typedef struct Tfswitch_Table Tfswitch_Table;
typedef struct Tfswitch_Prefetch Tfswitch_Prefetch;
typedef struct Tfswitch_Server Tfswitch_Server;
typedef struct Tfswitch_ServedModel Tfswitch_ServedModel;
typedef struct Tfswitch_ServedRows Tfswitch_ServedRows;

// Receives some rows of a table, one after another. The pointers are valid
// until the function returns. `slots` is NULL if slots were not requested. A
// return value other than 0 stops the export.
typedef int (*Tfswitch_VisitRows)(void* context, const int64_t* keys,
                                  const float* embeddings, const float* slots,
                                  size_t num_rows);

// Threads that a caller lends for one call, in addition to its own thread; NULL
// for none. `schedule` makes one of them call task(task_context) once, maybe
// only after the call has returned.
typedef struct Tfswitch_Threads {
  int32_t num_threads;
  void* context;
  void (*schedule)(void* context, void (*task)(void* task_context),
                   void* task_context);
} Tfswitch_Threads;

// PEM files for TLS, as in TlsFiles of cc/rpc/tls.h; "" for none.
typedef struct Tfswitch_TlsFiles {
  const char* ca;
  const char* cert;
  const char* key;
  const char* server_name;
} Tfswitch_TlsFiles;

// How a client identifies itself, and which servers it trusts.
typedef struct Tfswitch_Credentials {
  // NULL for plaintext.
  const Tfswitch_TlsFiles* tls;
  // A token, or the path of a file that contains one; "" for none.
  const char* token;
  const char* token_file;
} Tfswitch_Credentials;

typedef struct Tfswitch_ServerOptions {
  const char* address;  // "host:port", port 0 for any, or "unix:/path".
  uint32_t shard_index;
  uint32_t num_shards;
  // 0 means one per core.
  int32_t num_threads;
  // 0 means the default, 1 GiB.
  uint64_t max_message_bytes;
  // The folder below which clients may save and restore. NULL means the current
  // folder. If the folder is "/" or "", clients may do neither.
  const char* checkpoint_root;
  // More flags of tfswitch-server that set its limits, for example
  // "max_tables=100".
  const char* const* limits;
  size_t num_limits;
  // NULL means plaintext.
  const Tfswitch_TlsFiles* tls;
  // NULL means that callers need no token.
  const char* token_file;
  // 1 opens the server to everyone who can reach it; see docs/access.md.
  int32_t is_insecure;
} Tfswitch_ServerOptions;

typedef struct Tfswitch_PushOptions {
  float learning_rate;
  // If a key has no row: 1 inserts a row before the push, 0 skips the key.
  int32_t insert_missing;
  // How often each id was shown and clicked: one number per key. NULL: shown
  // once, never clicked.
  const float* shows;
  const float* clicks;
  // The number of the training step, from 1 on; 0 if it is not known.
  int64_t global_step;
  // If gradients have NaN or Inf: 1 skips the push, with a warning on stderr; 0
  // returns an error.
  int32_t skip_non_finite;
} Tfswitch_PushOptions;

typedef struct Tfswitch_PushResult {
  int64_t updated_rows;  // -1 if the push is still in flight.
  // 1 if nothing was applied, because gradients had NaN or Inf.
  int32_t skipped;
} Tfswitch_PushResult;

// One read of a pull.
typedef struct Tfswitch_PullPart {
  Tfswitch_Table* table;
  const int64_t* keys;
  size_t num_keys;
  float* embeddings;  // num_keys x dim.
} Tfswitch_PullPart;

// One write of a push.
typedef struct Tfswitch_PushPart {
  Tfswitch_Table* table;
  const int64_t* keys;
  size_t num_keys;
  const float* gradients;  // num_keys x dim; keys may repeat.
  Tfswitch_PushOptions options;
  Tfswitch_PushResult result;  // Set by the call.
} Tfswitch_PushPart;

// One table's read in served_lookup.
typedef struct Tfswitch_ServedPart {
  const char* table;
  int32_t dim;  // The dim that the caller expects.
  const int64_t* keys;
  size_t num_keys;
  float* embeddings;  // num_keys x dim.
} Tfswitch_ServedPart;

// Identifies a worker in its group, for the functions replicas_* below.
typedef struct Tfswitch_ReplicaPlace {
  uint64_t incarnation;
  int64_t clock;
  int64_t round;
} Tfswitch_ReplicaPlace;

// The round to apply: the staged gradients that are summed up, in this order.
typedef struct Tfswitch_Round {
  int64_t number;
  double total_weight;
  size_t num_contributions;
  const int64_t* keys;    // num_contributions x (worker, incarnation, clock).
  const double* weights;  // num_contributions.

  // The active incarnations of workers. All other incarnations below
  // next_incarnation have ended.
  size_t num_active;
  const int64_t* active;
  int64_t next_incarnation;
} Tfswitch_Round;

typedef struct Tfswitch_Api {
  uint32_t api_version;          // TFSWITCH_API_VERSION of the core.
  const char* (*version)(void);  // "0.1.0"
  void (*free_string)(char* string);

  // --- Clusters ---------------------------------------------------------
  // "local://" or "local://NAME" is a cluster with tables in this process, one
  // cluster for each name. "grpc://host:port,host:port",
  // "grpcs://host:port,host:port" (TLS) and "grpc+unix:///path" list servers in
  // shard order. "ray://NAME" means the servers that were set with the method
  // PlaceServers of `call`. Waits for every server to answer. Each open needs a
  // close. All that open the same address share its connections.
  //
  // With the `id` of a cluster that is open at this address, opens that one.
  // With id 0, `credentials` choose among the open clusters; from now on they
  // are used for this address. If none are given, uses those of the last
  // opening that had some, else those of the environment (TFSWITCH_TLS_CA,
  // _CERT, _KEY, _SERVER_NAME, TFSWITCH_TOKEN, TFSWITCH_TOKEN_FILE).
  int (*open_cluster)(const char* address, double timeout_s,
                      const Tfswitch_Credentials* credentials, uint64_t id,
                      Tfswitch_Cluster** cluster, char* error);
  void (*close_cluster)(Tfswitch_Cluster* cluster);
  int32_t (*cluster_num_shards)(const Tfswitch_Cluster* cluster);
  // 1 if calls wait for a network, 0 if the tables are in this process.
  int32_t (*cluster_is_remote)(const Tfswitch_Cluster* cluster);
  // Makes a call that is not time-critical: a method of
  // protos/tfswitch/v1/control.proto, whose request and response are JSON.
  // `cluster` may be NULL for FinishPushes, PlaceServers, ServedModel,
  // Replicas.
  int (*call)(Tfswitch_Cluster* cluster, const char* method,
              const char* request_json, char** response_json, char* error);

  // --- Tables -----------------------------------------------------------
  // Creates the table, or attaches to it if it exists with an equal config.
  // `config_json` is a message TableConfig in JSON. The table keeps its cluster
  // open. A table of this process is dropped when each open_table has been
  // followed by its close_table.
  int (*open_table)(Tfswitch_Cluster* cluster, const char* config_json,
                    Tfswitch_Table** table, char* error);
  void (*close_table)(Tfswitch_Table* table);
  int32_t (*table_dim)(const Tfswitch_Table* table);
  int32_t (*table_slot_floats)(const Tfswitch_Table* table);
  int32_t (*table_is_remote)(const Tfswitch_Table* table);
  int (*table_size)(Tfswitch_Table* table, int64_t* num_rows, char* error);

  // Reads the rows of all parts, at most TFSWITCH_MAX_PARTS. Sends one message
  // to each server, unless messages would be too long. Several parts may have
  // the same table.
  int (*pull)(const Tfswitch_PullPart* parts, size_t num_parts,
              int32_t insert_missing, const Tfswitch_Threads* threads,
              char* error);
  // Makes the pushes of all parts, at most TFSWITCH_MAX_PARTS, with one message
  // to each server unless messages would be too long. Each distinct key takes
  // one step with the sum of its gradients. If one push is skipped, all are.
  // Shapes, numbers and rates are checked first: if one is wrong, nothing is
  // applied. After an error of a server (no such table, no memory, no answer)
  // some pushes may have been applied; the error names the table.
  //
  // If `depth` is not 0, the call waits until fewer than `depth` calls' pushes
  // are in flight, checks its own, copies them, and returns before they are
  // applied. Pushes are applied in the order of the calls. If one fails later,
  // the next function that gets the cluster or one of its tables returns its
  // error and does nothing else. Functions other than a push first wait until
  // no push is in flight, except for methods of `call` that only watch.
  int (*push)(Tfswitch_PushPart* parts, size_t num_parts, int32_t depth,
              const Tfswitch_Threads* threads, char* error);

  // Sets only embeddings if `slots` is NULL, else whole rows. If a key is
  // repeated, its last value counts.
  int (*assign)(Tfswitch_Table* table, const int64_t* keys, size_t num_keys,
                const float* embeddings, const float* slots, char* error);
  int (*erase)(Tfswitch_Table* table, const int64_t* keys, size_t num_keys,
               int64_t* erased_rows, char* error);
  int (*export_rows)(Tfswitch_Table* table, int32_t with_slots,
                     Tfswitch_VisitRows visit, void* context, char* error);

  // --- Servers in this process -------------------------------------------
  int (*start_server)(const Tfswitch_ServerOptions* options,
                      Tfswitch_Server** server, char* error);
  // The bound address; valid until delete_server.
  const char* (*server_address)(const Tfswitch_Server* server);
  // Stops the server: waits at most `grace_s` for calls in progress, then ends
  // them. Further calls do nothing.
  void (*stop_server)(Tfswitch_Server* server, double grace_s);
  // Stops the server without waiting, and frees it.
  void (*delete_server)(Tfswitch_Server* server);

  // The table's name; valid until close_table.
  const char* (*table_name)(const Tfswitch_Table* table);

  // --- Dense tables: a model's variables as rows of a table ---------------
  // The keys of the `num_blocks` blocks of a dense table.
  void (*dense_keys)(const Tfswitch_Table* table, size_t num_blocks,
                     int64_t* keys);
  // Like assign(), but existing rows do not change. *assigned_rows receives the
  // number of rows that were set.
  int (*assign_missing)(Tfswitch_Table* table, const int64_t* keys,
                        size_t num_keys, const float* embeddings,
                        int64_t* assigned_rows, char* error);

  // --- Training with other workers ----------------------------------------
  // Ends a step of `weight` samples and waits as the consistency says. Pushes
  // to bsp tables since the last end of a step belong to this step. *round
  // receives the round to which the next step contributes.
  int (*end_step)(Tfswitch_Cluster* cluster, double weight, int64_t* round,
                  char* error);
  int (*table_end_step)(Tfswitch_Table* table, double weight, int64_t* round,
                        char* error);

  // --- Synchronous steps on variables of TensorFlow -------------------------
  // These call the groups of this process, by name; see ReplicaCoordinator.
  // `wait_s` bounds each wait. After DEADLINE_EXCEEDED, make the same call to
  // continue waiting. *has_arrived must be 0 at first.
  int (*replicas_end_step)(const char* group, uint32_t worker, double weight,
                           double wait_s, Tfswitch_ReplicaPlace* place,
                           int32_t* has_arrived, char* error);
  int (*replicas_heartbeat)(const char* group, uint32_t worker,
                            uint64_t incarnation, uint64_t applier,
                            char* error);
  int (*replicas_next_round)(const char* group, uint64_t applier, double wait_s,
                             Tfswitch_Round** round, char* error);
  void (*free_round)(Tfswitch_Round* round);
  int (*replicas_confirm_round)(const char* group, uint64_t applier,
                                int64_t number, char* error);

  // --- Items of work queues that a step trains -----------------------------

  // Tells that the current step has trained the item up to `offset`.
  int (*advance_work_item)(Tfswitch_Cluster* cluster, const char* queue,
                           int64_t epoch, int64_t index, int64_t offset,
                           char* error);
  // *state receives the item's state for this worker, a TFSWITCH_WORK_ITEM_...
  // value.
  int (*work_item_state)(Tfswitch_Cluster* cluster, const char* queue,
                         int64_t epoch, int64_t index, int32_t* state,
                         char* error);

  // --- The life of rows ---------------------------------------------------
  // Reads the counters of each key. `usage` (num_keys x 5) receives count,
  // last_seen_day, show, click and delta_score. `states` (num_keys) receives 0
  // for an unknown key, 1 for a key that waits for admission, 2 for a key with
  // a row.
  int (*read_usage)(Tfswitch_Table* table, const int64_t* keys, size_t num_keys,
                    float* usage, uint8_t* states, char* error);

  // --- What serves exports ---------------------------------------
  // Opens the rows of an exported model. `model_file` is among its assets. If
  // the rows are on servers, waits for the servers.
  int (*open_served_model)(const char* model_file, Tfswitch_ServedModel** model,
                           char* error);
  void (*close_served_model)(Tfswitch_ServedModel* model);
  // Whether served_lookup waits for servers.
  int32_t (*served_model_is_remote)(const Tfswitch_ServedModel* model);
  // Returns the rows that are served now; NULL if there is no memory. They
  // exist until they are unpinned, and do not change unless they are on
  // servers.
  Tfswitch_ServedRows* (*pin_served_rows)(Tfswitch_ServedModel* model);
  void (*unpin_served_rows)(Tfswitch_ServedRows* rows);
  // Reads the rows of all parts. Sends one message to each server, unless
  // messages would be too long. Several parts may have the same table.
  int (*served_lookup)(const Tfswitch_ServedRows* rows,
                       const Tfswitch_ServedPart* parts, size_t num_parts,
                       const Tfswitch_Threads* threads, char* error);

  // --- Interruption ---------------------------------------------------------
  // Sets a function that waiting calls call at intervals, on their own thread.
  // If it returns nonzero, the call ends with the code of Cancelled. NULL
  // removes the function.
  void (*set_interrupt_check)(int (*check)(void));

  // --- Which cluster ---------------------------------------------------------
  // The id for open_cluster, unique among the clusters of all processes.
  uint64_t (*cluster_id)(const Tfswitch_Cluster* cluster);

  // --- Served files that become shorter --------------------------------------
  // Installs a SIGBUS handler for the whole process. A lookup that gets the
  // signal in a row file then ends with an error. For programs without a
  // handler.
  void (*catch_bus_errors)(void);

  // --- Rows that are read ahead ----------------------------------------------
  // Makes a ticket of each part; `embeddings` is not used. A later pull of the
  // same keys takes the rows of the ticket. If `is_exact` is 1, these are the
  // rows that a pull would read then, as far as this process changes them.
  // sources[i] is a number of the caller of part i, not 0. Beyond `limit`
  // tickets of one table and source, the oldest is dropped. Only run_prefetch
  // reads the rows. It blocks, and frees *prefetch.
  int (*begin_prefetch)(const Tfswitch_PullPart* parts, size_t num_parts,
                        int32_t is_exact, const uint64_t* sources, size_t limit,
                        Tfswitch_Prefetch** prefetch, char* error);
  void (*run_prefetch)(Tfswitch_Prefetch* prefetch);
} Tfswitch_Api;

// Returns the core's functions, or NULL if the core does not support
// `api_version`.
#if defined(TFSWITCH_BUILDING_CORE)
__attribute__((visibility("default")))
#endif
const Tfswitch_Api*
Tfswitch_GetApi(uint32_t api_version);

typedef const Tfswitch_Api* (*Tfswitch_GetApiFn)(uint32_t api_version);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // TFSWITCH_CC_CAPI_TFSWITCH_H_
