//! Packets of the control channel: to the session that they are of, or to the gate.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use weft_openvpn::gate::{Admission, Gated};
use weft_openvpn::session::{Session, session_of};

use super::sessions::{Done, Then};
use super::{CLIENTS_MAX, Serving, unix_s};
use crate::services::gateway::client::{Client, Todo};
use crate::services::gateway::sockets::Transport;

/// The highest number of a client, which is its number in data packets.
const NUMBER_MAX: u32 = 0xff_fffe;

impl Serving {
    /// A packet of the control channel.
    pub(super) fn handle_packet(
        &mut self,
        at: Transport,
        (source, local): (SocketAddr, Option<IpAddr>),
        packet: Vec<u8>,
    ) {
        let session = session_of(&packet);
        let here = self.places.get(&(at, source)).into_iter().flatten();
        for number in here {
            let client = self.clients.get_mut(number);
            if let Some(client) = client.filter(|client| Some(client.remote) == session) {
                client.local = local.or(client.local);
                return self.ask(*number, Todo::Datagram(packet));
            }
        }
        // A connection that the device has serves one session.
        let Transport::Udp(transport) = at else { return self.count("other_session") };
        // Before the gate, which admits each client once.
        if self.clients.len() >= CLIENTS_MAX {
            return self.count("too_many_clients");
        }
        let (now, unix_s) = (Instant::now(), unix_s());
        match self.begun.gate.handle_datagram(now, unix_s, source, &packet) {
            Ok(Gated::Answer(answer)) => {
                self.begun.channel.send(transport, (local, source), &answer);
            }
            Ok(Gated::Admit(admission)) => {
                let number = self.admit(at, source, *admission);
                if let Some(client) = self.clients.get_mut(&number) {
                    client.local = local.or(client.local);
                }
            }
            Err(refusal) => {
                // The next ones come no further than the device.
                if let Some(until) = self.begun.gate.shut_until(now) {
                    self.begun.channel.drop_resets(until);
                }
                tracing::debug!(%source, %refusal, "dropped a first packet");
                self.count("first_packet_refused");
            }
        }
    }

    /// Opens a session, on a thread: its first packet may have TLS's public-key work.
    pub(super) fn admit(
        &mut self,
        transport: Transport,
        source: SocketAddr,
        admission: Admission,
    ) -> u32 {
        let number = self.free_number();
        let client = Client::new(admission.remote(), transport, source);
        self.clients.insert(number, client);
        self.places.entry((transport, source)).or_default().push(number);
        let options = match transport {
            Transport::Udp(_) => Arc::clone(&self.options),
            Transport::Tcp => Arc::clone(&self.stream_options),
        };
        let seed: [u8; 32] = rand::random();
        self.jobs.spawn_blocking(move || {
            let (now, unix_s) = (Instant::now(), unix_s());
            let session = Session::admit(now, unix_s, admission, options, source, &seed);
            let session = session.inspect_err(|error| tracing::warn!(%error, "no session"));
            Done { number, session: session.ok().map(Box::new), then: Then::Ran }
        });
        number
    }

    pub(super) fn free_number(&mut self) -> u32 {
        loop {
            let number = self.next;
            self.next = if number == NUMBER_MAX { 0 } else { number + 1 };
            if !self.clients.contains_key(&number) {
                return number;
            }
        }
    }
}
