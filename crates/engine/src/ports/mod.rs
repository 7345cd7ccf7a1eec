//! TAP devices and sockets: how frames and datagrams come in and go out, and whose turn it is.

pub(crate) mod device;
pub(crate) mod direct;
pub(crate) mod errno;
pub(crate) mod port_demux;
pub(crate) mod port_reader;
pub(crate) mod round_robin;
pub(crate) mod socket_buckets;
pub(crate) mod tap_queues;
pub(crate) mod ticket_gate;
