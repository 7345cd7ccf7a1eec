//! How clients go, and which others have their names.

use std::net::SocketAddr;

use super::Serving;
use crate::services::gateway::client::{Client, Stage};
use crate::services::gateway::journal::Weight;
use crate::services::gateway::sockets::Transport;

impl Serving {
    pub(super) fn forget_others(&mut self, number: u32, name: &str) {
        for other in self.named(name) {
            if other != number && self.clients.get(&other).is_some_and(Client::is_peer) {
                self.told(other, "it has connected again");
                self.forget(other);
            }
        }
    }

    /// The clients of a name.
    pub(super) fn named(&self, name: &str) -> Vec<u32> {
        self.names.get(name).cloned().unwrap_or_default()
    }

    /// A client is no more the one of a name.
    pub(super) fn unname(&mut self, number: u32, name: &str) {
        let Some(numbers) = self.names.get_mut(name) else { return };
        numbers.retain(|other| *other != number);
        if numbers.is_empty() {
            self.names.remove(name);
        }
    }

    /// Says that a client is gone.
    pub(super) fn told(&self, number: u32, reason: &str) {
        let client = self.clients.get(&number).filter(|client| client.is_connected());
        if let Some((client, known)) = client.and_then(|it| Some((it, it.known()?))) {
            let (name, from) = (&known.login.name, client.address);
            tracing::info!(client = name, %from, reason, "an OpenVPN client is gone");
            let text = format!("is gone: {reason}");
            self.gateway.journal.line_of(Weight::Info, name, from, &text);
        }
    }

    /// Ends a client's traffic; its session still repeats its last words.
    pub(super) fn leave(&mut self, number: u32) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        let stage = std::mem::replace(&mut client.stage, Stage::Over);
        let connection = client.connection;
        if let Stage::Peer { known, .. } = &stage {
            self.begun.channel.remove_peer(number);
            self.gateway.unname(number);
            self.gateway.peers.left(&self.session_of(&known.login.name));
            if let Some(connection) = connection {
                self.begun.streams.take_back(connection);
            }
        }
        match stage {
            Stage::Asked(known) => self.unname(number, &known.login.name),
            Stage::Routing(known) | Stage::Peer { known, .. } => {
                self.unname(number, &known.login.name);
                self.routes.remove(&known.addresses);
                self.look_if_behind(&known.login.name);
            }
            Stage::Handshake | Stage::Over => {}
        }
    }

    /// Ends all of a client.
    pub(super) fn forget(&mut self, number: u32) {
        self.leave(number);
        let Some(client) = self.clients.remove(&number) else { return };
        if let Some(timer) = client.timer {
            self.timers.remove(&(timer, number));
        }
        if let Some(at) = client.token_at {
            self.token_timers.remove(&(at, number));
        }
        if let Some(connection) = client.connection {
            self.begun.streams.close(connection);
        }
        self.leave_place(number, client.transport, client.address);
    }

    pub(super) fn leave_place(&mut self, number: u32, transport: Transport, address: SocketAddr) {
        let Some(here) = self.places.get_mut(&(transport, address)) else { return };
        here.retain(|other| *other != number);
        if here.is_empty() {
            self.places.remove(&(transport, address));
        }
    }
}
