//! The transports of a device's peers.

use std::collections::BTreeMap;
use std::io;
use std::net::TcpStream;
use std::sync::Arc;

use super::sockets::{Connection, Reading, Socket};

/// The transport of a peer.
pub(super) enum Way {
    /// A socket, which other peers may share.
    Udp(Arc<Socket>),
    /// A separate connection.
    Tcp(Connection),
    /// A connection that only the device holds.
    Device,
}

/// All peers by their ids.
#[derive(Default)]
pub(super) struct Book(BTreeMap<u32, Way>);

impl Book {
    /// Adds a peer, and replaces an earlier record of its id.
    pub(super) fn insert(&mut self, id: u32, way: Way) {
        self.0.insert(id, way);
    }

    pub(super) fn remove(&mut self, id: u32) {
        self.0.remove(&id);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Keeps only the peers whose ids pass.
    pub(super) fn retain(&mut self, stays: impl Fn(u32) -> bool) {
        self.0.retain(|id, _| stays(*id));
    }

    /// The socket of a peer.
    pub(super) fn socket(&self, id: u32) -> Option<Arc<Socket>> {
        match self.0.get(&id)? {
            Way::Udp(socket) => Some(Arc::clone(socket)),
            Way::Tcp(_) | Way::Device => None,
        }
    }

    /// A duplicate descriptor of a peer's connection.
    pub(super) fn stream(&self, id: u32) -> Option<io::Result<TcpStream>> {
        match self.0.get(&id)? {
            Way::Tcp(connection) => Some(connection.try_clone()),
            Way::Udp(_) | Way::Device => None,
        }
    }

    /// Stops reading the connections of the peers whose ids pass.
    pub(super) fn stop_reading(&mut self, stops: impl Fn(u32) -> bool) {
        for (id, way) in &mut self.0 {
            if let Way::Tcp(connection) = way
                && stops(*id)
            {
                connection.stop_reading();
            }
        }
    }

    /// Resumes reading connections.
    pub(super) fn read_again(&mut self, reading: &Reading) {
        for (id, way) in &mut self.0 {
            if let Way::Tcp(connection) = way
                && let Err(error) = connection.read_again(reading)
            {
                tracing::warn!(peer = id, %error, "cannot read packets of the control channel");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_peer_that_is_gone_no_transport_is_known() {
        let mut book = Book::default();
        for id in [1, 2, 3] {
            book.insert(id, Way::Device);
        }
        book.remove(1);
        book.retain(|id| id == 2);
        assert_eq!(book.0.keys().copied().collect::<Vec<u32>>(), [2]);
        assert!(book.socket(2).is_none() && book.stream(2).is_none() && book.stream(3).is_none());
        book.clear();
        assert!(book.0.is_empty());
    }
}
