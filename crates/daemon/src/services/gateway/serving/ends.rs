//! How clients go, and which others have their names.

use std::net::SocketAddr;

use super::Serving;
use crate::services::gateway::client::{Client, Stage};
use crate::services::gateway::journal::Weight;
use crate::services::gateway::sockets::Transport;

/// Why a client is gone whose next session is there.
const AGAIN: &str = "it has connected again";

impl Serving {
    /// Where a name may have several sessions, ends those that come from the same place as a new one: their client has
    /// begun anew, and gets what they had. Otherwise they end when the new one is let in.
    pub(super) fn forget_earlier(&mut self, number: u32, name: &str) {
        let client = self.clients.get(&number);
        let is_new = |client: &&Client| matches!(client.stage, Stage::Handshake);
        let Some(client) = client.filter(is_new).filter(|_| self.allows_duplicates()) else {
            return;
        };
        let here = self.places.get(&(client.transport, client.address));
        for other in here.cloned().unwrap_or_default() {
            let known = self.clients.get(&other).and_then(|it| it.known());
            if other != number && known.is_some_and(|known| known.login.name == name) {
                self.told(other, AGAIN);
                self.forget(other);
            }
        }
    }

    pub(super) fn forget_others(&mut self, number: u32, name: &str) {
        for other in self.named(name) {
            if other != number && self.clients.get(&other).is_some_and(Client::is_peer) {
                self.told(other, AGAIN);
                self.forget(other);
            }
        }
    }

    /// The newest session of a name that the host is set up for, or is being set up for.
    pub(super) fn newest(&self, name: &str) -> Option<u32> {
        let is_set_up = |it: &Client| matches!(it.stage, Stage::Routing(_) | Stage::Peer { .. });
        let its = self.names.get(name)?;
        its.iter().rev().copied().find(|it| self.clients.get(it).is_some_and(is_set_up))
    }

    /// The clients of a name, in the order in which they have shown who they are.
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
