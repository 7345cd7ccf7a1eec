//! The task of one connection.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::Instant;
use weft_openvpn::gate::FIRST_PACKET_BYTES_MAX;
use weft_openvpn::{Opcode, frame};

use super::{Number, StreamEvent};

/// How long a client may take for its first packet.
const SPEAK_LIMIT: Duration = Duration::from_secs(10);
/// How long last words may take, and the other end until it closes.
const PART_LIMIT: Duration = Duration::from_secs(5);
/// The longest later packet, in bytes: OpenVPN's own are at most about 1,500.
pub(in crate::services::gateway) const PACKET_BYTES_MAX: usize = 4_096;
/// Bytes that wait for the connection to take them.
const PENDING_BYTES_MAX: usize = 64 * 1024;
/// Bytes of the length before a packet.
const LENGTH_BYTES: usize = 2;

/// The other end has closed the connection.
pub(super) const CLOSED: &str = "its connection was closed";
const BROKEN: &str = "its connection is broken";
/// The bytes are no frames.
pub(super) const BAD_FRAME: &str = "its connection carries no frames of OpenVPN";
/// The first packet did not come in time.
const SILENT: &str = "it said nothing on its connection in time";
const READS_NOTHING: &str = "it reads nothing from its connection";

/// What the service wants of a connection. The end of orders means: send what waits, and end.
pub(in crate::services::gateway) enum Order {
    Send(Box<[u8]>),
    Give,
}

/// The task's part of a connection.
pub(super) struct Task {
    number: Number,
    events: mpsc::Sender<StreamEvent>,
    orders: mpsc::Receiver<Order>,
    permits: Arc<Semaphore>,
    /// The part of a frame that has come. Never more, since the device reads on at the end of a frame.
    held: Vec<u8>,
    /// The longest packet that may come now.
    limit: usize,
    /// Frames that the connection has not taken yet.
    pending: Vec<u8>,
    is_giving: bool,
}

/// How a task goes on.
enum Turn {
    Order(Option<Order>),
    Readable(io::Result<()>),
    Writable(io::Result<()>),
    Silent,
}

/// Why a task stops.
enum Stop {
    /// The connection is at the end of a frame, and is to be given away.
    Give,
    /// The service has let it go.
    LetGo,
    Over(&'static str),
}

impl Task {
    pub(super) const fn new(
        number: Number,
        events: mpsc::Sender<StreamEvent>,
        orders: mpsc::Receiver<Order>,
        permits: Arc<Semaphore>,
    ) -> Self {
        Self {
            number,
            events,
            orders,
            permits,
            held: Vec::new(),
            limit: FIRST_PACKET_BYTES_MAX,
            pending: Vec::new(),
            is_giving: false,
        }
    }

    /// Carries packets until the connection is given away or over.
    pub(super) async fn serve(mut self, stream: TcpStream) {
        let connection = self.number;
        let event = match self.carry(&stream).await {
            Stop::Give => match stream.into_std() {
                Ok(stream) => StreamEvent::Given { connection, stream, left: self.orders },
                Err(_) => StreamEvent::Closed { connection, reason: BROKEN },
            },
            Stop::Over(reason) => StreamEvent::Closed { connection, reason },
            Stop::LetGo => return finish(&stream, self.pending).await,
        };
        // A service that has ended needs no news.
        let _ = self.events.send(event).await;
    }

    /// Sends last words until the service has no more.
    pub(super) async fn part(mut self, stream: TcpStream) {
        let limit = Instant::now() + PART_LIMIT;
        loop {
            let turn = tokio::select! {
                order = self.orders.recv() => Turn::Order(order),
                writable = stream.writable(), if !self.pending.is_empty() => Turn::Writable(writable),
                () = tokio::time::sleep_until(limit) => break,
            };
            match turn {
                Turn::Order(None) => break,
                Turn::Order(Some(Order::Send(packet))) if self.queue(&packet).is_err() => break,
                _ => {}
            }
            if write(&stream, &mut self.pending).is_err() {
                return;
            }
        }
        finish(&stream, self.pending).await;
    }

    async fn carry(&mut self, stream: &TcpStream) -> Stop {
        let silent_at = Instant::now() + SPEAK_LIMIT;
        loop {
            if self.is_giving && self.held.is_empty() && self.pending.is_empty() {
                return Stop::Give;
            }
            let is_first = self.limit == FIRST_PACKET_BYTES_MAX;
            let turn = tokio::select! {
                order = self.orders.recv() => Turn::Order(order),
                readable = readable(stream, &self.permits) => Turn::Readable(readable),
                writable = stream.writable(), if !self.pending.is_empty() => Turn::Writable(writable),
                () = tokio::time::sleep_until(silent_at), if is_first => Turn::Silent,
            };
            let done = match turn {
                Turn::Order(None) => Err(Stop::LetGo),
                Turn::Order(Some(Order::Give)) => {
                    self.is_giving = true;
                    Ok(())
                }
                Turn::Order(Some(Order::Send(packet))) => self.queue(&packet).and_then(|()| {
                    write(stream, &mut self.pending).map_err(|_| Stop::Over(BROKEN))
                }),
                Turn::Writable(Ok(())) => {
                    write(stream, &mut self.pending).map_err(|_| Stop::Over(BROKEN))
                }
                Turn::Readable(Ok(())) => self.read(stream).await,
                Turn::Readable(Err(_)) | Turn::Writable(Err(_)) => Err(Stop::Over(BROKEN)),
                Turn::Silent => Err(Stop::Over(SILENT)),
            };
            if let Err(stop) = done {
                return stop;
            }
        }
    }

    fn queue(&mut self, packet: &[u8]) -> Result<(), Stop> {
        if self.pending.len() + packet.len() > PENDING_BYTES_MAX {
            return Err(Stop::Over(READS_NOTHING));
        }
        frame::write(packet, &mut self.pending).map_err(|_| Stop::Over(BROKEN))
    }

    /// Reads on in a frame, and tells its packet once it is whole.
    async fn read(&mut self, stream: &TcpStream) -> Result<(), Stop> {
        let wanted = match self.held[..] {
            [high, low, ..] => LENGTH_BYTES + usize::from(u16::from_be_bytes([high, low])),
            _ => LENGTH_BYTES,
        };
        let at = self.held.len();
        self.held.resize(wanted, 0);
        let read = stream.try_read(&mut self.held[at..]);
        self.held.truncate(at + read.as_ref().map_or(0, |read| *read));
        match read {
            Ok(0) => return Err(Stop::Over(CLOSED)),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(_) => return Err(Stop::Over(CLOSED)),
        }
        let packet = match frame::split(&self.held, self.limit) {
            Ok(Some((packet, _))) => packet.to_vec(),
            Ok(None) => return Ok(()),
            Err(_) => return Err(Stop::Over(BAD_FRAME)),
        };
        self.held.clear();
        self.limit = PACKET_BYTES_MAX;
        let opcode = packet.first().map(|first| Opcode::parse(*first));
        if matches!(opcode, Some(Ok((opcode, _))) if opcode.is_data()) {
            return Ok(());
        }
        if let Ok(permit) = self.permits.try_acquire() {
            permit.forget();
        }
        let event = StreamEvent::Packet { connection: self.number, packet };
        self.events.send(event).await.map_err(|_| Stop::LetGo)
    }
}

/// Waits for bytes, once the service takes one more packet.
async fn readable(stream: &TcpStream, permits: &Semaphore) -> io::Result<()> {
    // Nobody closes it.
    let _permit = permits.acquire().await;
    stream.readable().await
}

/// Sends what the connection takes now.
fn write(stream: &TcpStream, pending: &mut Vec<u8>) -> io::Result<()> {
    while !pending.is_empty() {
        match stream.try_write(pending) {
            Ok(written) => drop(pending.drain(..written)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Sends the rest, says that nothing more comes, and waits until the other end closes: bytes that nobody reads would
/// take the last words with them.
async fn finish(stream: &TcpStream, mut pending: Vec<u8>) {
    let end = async {
        while !pending.is_empty() {
            stream.writable().await?;
            write(stream, &mut pending)?;
        }
        rustix::net::shutdown(stream, rustix::net::Shutdown::Write)?;
        let mut waste = [0; 1_024];
        loop {
            stream.readable().await?;
            match stream.try_read(&mut waste) {
                Ok(0) => return io::Result::Ok(()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    };
    let _ = tokio::time::timeout(PART_LIMIT, end).await;
}
