//! Clients over TCP: their connections until they are peers of the device.

use std::time::Instant;

use super::{CLIENTS_MAX, Serving, unix_s};
use crate::services::gateway::client::{Stage, Todo};
use crate::services::gateway::sockets::Transport;
use crate::services::gateway::streams::{Number, Sent, StreamEvent};

/// Why a client is gone whose connection had to give way to others.
const EVICTED: &str = "too many connections wait for clients to show who they are";
const LOST: &str = "its connection takes nothing more";

impl Serving {
    pub(super) fn handle_stream(&mut self, event: StreamEvent) {
        match event {
            StreamEvent::Opened(stream, source) => {
                let Some(opened) = self.begun.streams.open(stream, source) else {
                    return self.count("too_many_connections");
                };
                if opened.has_evicted {
                    self.count("connection_evicted");
                }
                if let Some(client) = opened.evicted {
                    self.told(client, EVICTED);
                    self.forget(client);
                }
            }
            StreamEvent::Packet { connection, packet } => {
                match self.begun.streams.client(connection) {
                    Some(number) => self.ask(number, Todo::Datagram(packet)),
                    None => self.handle_first_packet(connection, &packet),
                }
            }
            StreamEvent::Given { connection, stream, left } => {
                if self.begun.streams.set_given(connection, stream, left).is_err() {
                    return self.lose_stream(connection, LOST);
                }
                let Some(number) = self.begun.streams.client(connection) else { return };
                let client = self.clients.get(&number);
                match client.is_some_and(|client| matches!(client.stage, Stage::Routing(_))) {
                    true => self.let_in(number),
                    // It was ended meanwhile.
                    false => self.begun.streams.take_back(connection),
                }
            }
            StreamEvent::Closed { connection, reason } => {
                if self.begun.streams.client(connection).is_none() {
                    self.count("connection_without_client");
                }
                self.lose_stream(connection, reason);
            }
        }
    }

    /// The first packet of a connection, which ends if that is none of a client's.
    fn handle_first_packet(&mut self, connection: Number, packet: &[u8]) {
        let Some(source) = self.begun.streams.source(connection) else { return };
        self.begun.streams.took(connection);
        if self.clients.len() >= CLIENTS_MAX {
            self.begun.streams.cut(connection);
            return self.count("too_many_clients");
        }
        let admitted =
            self.begun.gate.handle_stream(Instant::now(), unix_s(), rand::random(), packet);
        match admitted {
            Ok(admission) => {
                let number = self.admit(Transport::Tcp, source, admission);
                self.begun.streams.set_client(connection, number);
                if let Some(client) = self.clients.get_mut(&number) {
                    client.connection = Some(connection);
                }
            }
            Err(refusal) => {
                tracing::debug!(%source, %refusal, "closed a connection after its first packet");
                self.count("first_packet_refused");
                self.begun.streams.cut(connection);
            }
        }
    }

    fn lose_stream(&mut self, connection: Number, reason: &'static str) {
        if let Some(number) = self.begun.streams.cut(connection) {
            self.told(number, reason);
            self.forget(number);
        }
    }

    /// Sends a packet of a client's session.
    pub(super) fn transmit(&mut self, number: u32, to: std::net::SocketAddr, packet: &[u8]) {
        let Some(client) = self.clients.get(&number) else { return };
        match (client.transport, client.connection) {
            (Transport::Udp(transport), _) => {
                self.begun.channel.send(transport, (client.local, to), packet);
            }
            (Transport::Tcp, Some(connection)) => {
                match self.begun.streams.send(connection, packet) {
                    Sent::Taken => {}
                    Sent::AtDevice if self.begun.channel.send_to_peer(number, packet) => {}
                    Sent::AtDevice | Sent::Gone => self.count("connection_takes_nothing"),
                }
            }
            (Transport::Tcp, None) => {}
        }
    }

    /// A packet of a client was taken: its connection may tell one more.
    pub(super) fn took(&self, number: u32) {
        if let Some(connection) = self.clients.get(&number).and_then(|client| client.connection) {
            self.begun.streams.took(connection);
        }
    }

    /// A client that has shown who it is takes no place of those that have not.
    pub(super) fn note_proven(&mut self, number: u32) {
        let Some(client) = self.clients.get(&number) else { return };
        if let Some(connection) = client.connection.filter(|_| client.known().is_some()) {
            self.begun.streams.set_proven(connection);
        }
    }
}
