//! A worker: one thread that runs each batch to completion.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver as Queue;

use weft_io::poller::{Poller, Waker};
use weft_io::tap::{FRAME_LEN_MAX, Tap};
use weft_io::udp::UdpSocket;
use weft_path::{EngineCommand, EngineEvent};

use crate::counters::WorkerCounters;
use crate::device::Env;
use crate::receive::Receiver;
use crate::run::errno;
use crate::state::State;
use crate::transmit::Transmitter;

/// Reads from the TAP device in one turn.
pub const TAP_READS_MAX: usize = 64;
/// Bytes read from the TAP device in one turn: about eight full super-packets.
pub const TAP_BYTES_MAX: usize = 8 * 65_536;
/// Batches received in one turn.
pub const UDP_BATCHES_MAX: usize = 4;
/// Commands carried out in one turn.
pub const COMMANDS_MAX: usize = 256;

const WAKER: u64 = 0;
const TAP: u64 = 1;
const SOCKET: u64 = 2;

/// What a worker owns.
pub(crate) struct Worker {
    pub(crate) tap: Tap,
    pub(crate) socket: Arc<UdpSocket>,
    pub(crate) state: State,
    pub(crate) transmitter: Transmitter,
    pub(crate) merge: (bool, bool),
    pub(crate) commands: Queue<EngineCommand>,
    pub(crate) waker: Waker,
    pub(crate) stop: Arc<AtomicBool>,
    pub(crate) counters: Arc<WorkerCounters>,
    pub(crate) events: Arc<dyn Fn(EngineEvent) + Send + Sync>,
}

impl Worker {
    /// Works until it is stopped.
    ///
    /// # Errors
    /// The TAP device, the socket or the poller is broken.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let mut poller = Poller::new()?;
        poller.add(&self.waker, WAKER)?;
        poller.add(&self.tap, TAP)?;
        poller.add(&self.socket, SOCKET)?;
        // Of this thread alone, hence made here.
        let mut receiver = Receiver::new();
        receiver.set_merging(self.merge.0, self.merge.1);
        let mut buffer = vec![0; FRAME_LEN_MAX];
        while !self.stop.load(Ordering::Relaxed) {
            let (mut woken, mut tap, mut socket) = (false, false, false);
            for token in poller.wait(None)? {
                match token {
                    WAKER => woken = true,
                    TAP => tap = true,
                    _ => socket = true,
                }
            }
            if woken {
                self.waker.clear();
                self.carry_out();
            }
            if socket {
                self.drain_socket(&mut receiver)?;
            }
            // What was just written may have been answered within the call, as TCP does.
            if tap || socket {
                self.drain_tap(&mut buffer)?;
            }
        }
        Ok(())
    }

    fn carry_out(&mut self) {
        for _ in 0..COMMANDS_MAX {
            let Ok(command) = self.commands.try_recv() else { return };
            self.command(command);
        }
        // More may wait.
        self.waker.wake();
    }

    fn command(&mut self, command: EngineCommand) {
        let Self { tap, socket, state, transmitter, counters, events, .. } = self;
        let env = Env { tap, socket: &**socket, counters, events: &**events };
        let name = name_of(&command);
        let result = match command {
            EngineCommand::SendProbe { path, probe, mtu, candidate } => {
                transmitter.send_probe(state, &env, (path, probe, mtu, candidate))
            }
            EngineCommand::SendKeepalive { path } => Transmitter::send_keepalive(state, &env, path),
            command => state.apply(command, |address| socket.remote(address)),
        };
        if let Err(error) = result {
            tracing::warn!(command = name, %error, "the engine could not carry out a command");
        }
    }

    fn drain_tap(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        let Self { tap, socket, state, transmitter, counters, events, .. } = self;
        let env = Env { tap: &*tap, socket: &**socket, counters, events: &**events };
        let mut bytes = 0;
        for _ in 0..TAP_READS_MAX {
            match tap.recv(buffer) {
                Ok(len) => {
                    transmitter.handle_read(state, &env, &mut buffer[..len]);
                    bytes += len;
                }
                Err(error) if nothing_now(&error) => break,
                Err(error) => return Err(error),
            }
            if bytes >= TAP_BYTES_MAX {
                break;
            }
        }
        transmitter.flush(&env);
        Ok(())
    }

    fn drain_socket(&mut self, receiver: &mut Receiver) -> io::Result<()> {
        for _ in 0..UDP_BATCHES_MAX {
            let max = receiver.messages_max();
            match self.socket.recv(&mut receiver.batch, max) {
                Ok(got) => {
                    // An SA that was installed before the peer heard of it is known before the
                    // first packet on it is opened.
                    self.carry_out();
                    let Self { tap, socket, state, counters, events, .. } = self;
                    let env = Env { tap: &*tap, socket: &**socket, counters, events: &**events };
                    receiver.handle_batch(state, &env);
                    if got < max {
                        break;
                    }
                }
                Err(error) if nothing_now(&error) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Errors of a read that say nothing about the next one: empty, interrupted, no memory, or an ICMP
/// error that some earlier datagram met.
fn nothing_now(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, HostUnreachable, NetworkUnreachable};
    matches!(error.kind(), ConnectionRefused | HostUnreachable | NetworkUnreachable)
        || matches!(
            error.raw_os_error(),
            Some(errno::EAGAIN | errno::EINTR | errno::ENOMEM | errno::ENOBUFS | errno::EMSGSIZE)
        )
}

const fn name_of(command: &EngineCommand) -> &'static str {
    match command {
        EngineCommand::InstallInbound { .. } => "install inbound",
        EngineCommand::RemoveInbound { .. } => "remove inbound",
        EngineCommand::InstallOutbound { .. } => "install outbound",
        EngineCommand::InstallPlain { .. } => "install plain",
        EngineCommand::RemoveOutbound { .. } => "remove outbound",
        EngineCommand::BindPath { .. } => "bind path",
        EngineCommand::SetPathMtu { .. } => "set path MTU",
        EngineCommand::SetRemote { .. } => "set remote",
        EngineCommand::SendProbe { .. } => "send probe",
        EngineCommand::SendKeepalive { .. } => "send keepalive",
        EngineCommand::SetEndpoints { .. } => "set endpoints",
        EngineCommand::SetBroadcast { .. } => "set broadcast",
        EngineCommand::RemovePeer { .. } => "remove peer",
    }
}
