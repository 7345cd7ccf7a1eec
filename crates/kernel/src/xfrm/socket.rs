//! The NETLINK_XFRM socket. It sends many requests at once, as a thousand peers' states must be there in seconds.

use std::io;

use tokio::sync::Mutex;

use crate::netlink::{
    error::RequestError,
    exchange::{Exchange, Outcome},
    notices::Notices,
    reader::Message,
    writer::Writer,
};

/// NETLINK_XFRM.
const PROTOCOL: isize = 6;
/// Requests sent in one call. Their answers must fit into the receive buffer.
const BATCH_REQUESTS_MAX: usize = 64;
/// Receive buffer of a socket, in bytes. A watch that falls further behind gets an error.
const RECEIVE_BUFFER_BYTES: usize = 8 << 20;

pub(super) struct Socket {
    exchange: Mutex<Exchange>,
    port: u32,
}

impl Socket {
    /// Opens a socket in the calling thread's network namespace.
    pub(super) fn open() -> io::Result<Self> {
        let mut exchange = Exchange::open(PROTOCOL, RECEIVE_BUFFER_BYTES)?;
        exchange.enlarge(RECEIVE_BUFFER_BYTES);
        let port = exchange.port()?;
        exchange.state_port(port);
        Ok(Self { exchange: Mutex::new(exchange), port })
    }

    /// The port number that the kernel's notices of our changes carry.
    pub(super) const fn port(&self) -> u32 {
        self.port
    }

    /// Sends all requests, a batch at a time, and returns their outcomes in order, with the objects as `read`
    /// reads them.
    pub(super) async fn run<T>(
        &self,
        mut requests: Vec<Writer>,
        read: impl Fn(&Message<'_>) -> Option<T>,
    ) -> Vec<Outcome<T>> {
        let mut exchange = self.exchange.lock().await;
        let mut outcomes = Vec::with_capacity(requests.len());
        for batch in requests.chunks_mut(BATCH_REQUESTS_MAX) {
            outcomes.extend(exchange.requests(batch, &read).await);
        }
        outcomes
    }

    /// Sends all requests, which ask for no object.
    pub(super) async fn change(&self, requests: Vec<Writer>) -> Vec<Result<(), RequestError>> {
        let outcomes = self.run(requests, |_| None::<()>).await;
        outcomes.into_iter().map(|outcome| outcome.map(|_| ())).collect()
    }

    /// Reads a whole table.
    pub(super) async fn dump<T>(
        &self,
        request: Writer,
        read: impl Fn(&Message<'_>) -> Option<T>,
    ) -> Result<Vec<T>, RequestError> {
        self.exchange.lock().await.dump(request, read).await
    }
}

/// Opens a socket for the notices of the groups of these bits.
pub(super) fn notices(groups: u32) -> io::Result<Notices> {
    let notices = Notices::open(PROTOCOL, groups, RECEIVE_BUFFER_BYTES)?;
    notices.enlarge(RECEIVE_BUFFER_BYTES);
    Ok(notices)
}
