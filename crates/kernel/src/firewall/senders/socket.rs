//! A NETLINK_NETFILTER socket that carries out transactions of nftables.

use std::io;

use netlink_sys::protocols::NETLINK_NETFILTER;

use super::{
    Member,
    codec::{self, Set, Step},
};
use crate::netlink::{
    error::RequestError, exchange::Exchange, reader::Message, socket::RECEIVE_BUFFER_BYTES,
};

/// After an error it is of no further use.
pub(super) struct Socket {
    exchange: Exchange,
}

impl Socket {
    /// Opens a socket in the calling thread's network namespace.
    pub(super) fn open() -> io::Result<Self> {
        Ok(Self { exchange: Exchange::open(NETLINK_NETFILTER, RECEIVE_BUFFER_BYTES)? })
    }

    /// The port number that the kernel's notices of our changes carry.
    pub(super) fn port(&self) -> io::Result<u32> {
        self.exchange.port()
    }

    /// Carries out all steps or none.
    pub(super) async fn change(&mut self, steps: &[Step<'_>]) -> Result<(), RequestError> {
        self.exchange.transaction(&mut codec::transaction(steps)).await
    }

    /// All members of a set; `None` for each that cannot be Weft's.
    pub(super) async fn members(&mut self, set: Set) -> Result<Vec<Option<Member>>, RequestError> {
        let read = |message: &Message<'_>| codec::members(set, message).collect::<Vec<_>>();
        self.exchange.dump(codec::listing(set), read).await
    }
}
