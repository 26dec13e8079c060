"""Saves of servers in object stores (docs/object_stores.md).

`_store` is a folder of a store, `_saves` reads manifests there and on the disk,
`_transfer` moves saves between the two. `companion` runs beside a server.
`store_checkpoints` is for clients, which ask the companion through
`_request_mailbox`. Nothing here imports TensorFlow.
"""
