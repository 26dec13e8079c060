#!/bin/bash
# A task of a job whose launcher sets TF_CONFIG in each of its containers or steps:
#
#   task.sh PROGRAM.py [ARGUMENT...]
#
# A task of type ps is a parameter server; all others run the program. A server that is
# killed, or crashes, is started again with its rows, at most three times. One that ends
# by itself has an error that would come again, and ends the task. SIGTERM has a server
# save its rows and end.
#
# TFSWITCH_SECRETS  a folder with ca.pem, server.pem and server.key, for the name
#                   tfswitch, and tokens; tasks that are no servers need ca.pem and token
# TFSWITCH_DATA     a folder for the rows of servers. Default: tfswitch_data, here
# TFSWITCH_FLAGS    more flags of `tfswitch serve`
set -euo pipefail

secrets="${TFSWITCH_SECRETS:?is the folder of certificates and tokens, and is not set}"
read -r type index < <(python3 -c '
import json, os
task = json.loads(os.environ["TF_CONFIG"])["task"]
print(task["type"], task["index"])')

if [[ $type != ps ]]; then
  export TFSWITCH_TLS_CA="$secrets/ca.pem" TFSWITCH_TLS_SERVER_NAME=tfswitch
  export TFSWITCH_TOKEN_FILE="$secrets/token"
  exec python3 "$@"
fi

data="${TFSWITCH_DATA:-$PWD/tfswitch_data}/$index"
mkdir -p "$data"
read -ra flags <<<"${TFSWITCH_FLAGS:-}"
# A second SIGTERM would kill a server in its save. Slurm and YARN send it to the task
# alone or to its group, and may repeat it: a server is in a session of its own, and gets
# it once. It also gets it when the task is killed.
own_session='
import ctypes, os, sys
os.setsid()
ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM
os.execvp(sys.argv[1], sys.argv[1:])'
is_stopped="" running=""
stop() {
  is_stopped=1
  [[ -n $running ]] || return 0
  trap "" TERM
  kill -TERM "$running" || true
  running=""
}
trap stop TERM

for ((restarts = 0; ; ++restarts)); do
  python3 -c "$own_session" tfswitch serve --data_dir="$data" --push_log \
    --tls_cert="$secrets/server.pem" --tls_key="$secrets/server.key" \
    --token_file="$secrets/tokens" "${flags[@]}" &
  server=$! running=$!
  [[ -z $is_stopped ]] || stop
  # The signal ends `wait`, too.
  while kill -0 "$server" 2>/dev/null; do wait "$server" || true; done
  running="" code=0
  wait "$server" || code=$?
  [[ -z $is_stopped ]] && ((code > 128 && restarts < 3)) || exit "$code"
  echo "task.sh: server $index ended with exit code $code, and is started again" >&2
done
