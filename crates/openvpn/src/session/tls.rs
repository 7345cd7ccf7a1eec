//! TLS without sockets: bytes in, bytes out, both in the clear and sealed.

use std::io::{ErrorKind, Read, Write};
use std::sync::Arc;

use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};
use zeroize::Zeroizing;

/// The most plaintext that waits for its reader, in bytes: two records of TLS.
pub(super) const PLAIN_BYTES_MAX: usize = 32 * 1_024;

/// One TLS session.
pub(super) struct Tls {
    connection: Box<Connection>,
    is_closed: bool,
}

impl Tls {
    pub(super) fn server(config: Arc<ServerConfig>) -> Result<Self, rustls::Error> {
        let connection = ServerConnection::new(config)?;
        Ok(Self { connection: Box::new(connection.into()), is_closed: false })
    }

    pub(super) fn client(
        config: Arc<ClientConfig>,
        name: ServerName<'static>,
    ) -> Result<Self, rustls::Error> {
        let connection = ClientConnection::new(config, name)?;
        Ok(Self { connection: Box::new(connection.into()), is_closed: false })
    }

    /// Takes sealed bytes and appends what is in them to `plain`. After an error there may be an alert to be sent.
    pub(super) fn receive(
        &mut self,
        mut bytes: &[u8],
        plain: &mut Vec<u8>,
    ) -> Result<(), rustls::Error> {
        while !bytes.is_empty() {
            let taken = self.connection.read_tls(&mut bytes);
            let is_stuck = !matches!(taken, Ok(count) if count > 0);
            self.connection.process_new_packets()?;
            self.read_plain(plain)?;
            if self.is_closed {
                break;
            }
            if is_stuck {
                return Err(rustls::Error::General("the buffer of TLS is full".to_owned()));
            }
        }
        Ok(())
    }

    fn read_plain(&mut self, plain: &mut Vec<u8>) -> Result<(), rustls::Error> {
        let mut piece = Zeroizing::new([0; 2_048]);
        loop {
            match self.connection.reader().read(&mut *piece) {
                Ok(0) => {
                    self.is_closed = true;
                    return Ok(());
                }
                Ok(count) if plain.len() + count > PLAIN_BYTES_MAX => {
                    let what = format!("more than {PLAIN_BYTES_MAX} bytes without an end");
                    return Err(rustls::Error::General(what));
                }
                Ok(count) => plain.extend_from_slice(piece.get(..count).unwrap_or_default()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(rustls::Error::General(error.to_string())),
            }
        }
    }

    /// Seals bytes; [`Self::take_output`] has them then.
    pub(super) fn send(&mut self, plain: &[u8]) -> Result<(), rustls::Error> {
        let sent = self.connection.writer().write_all(plain);
        sent.map_err(|error| rustls::Error::General(error.to_string()))
    }

    /// Appends what is to be sent.
    pub(super) fn take_output(&mut self, out: &mut Vec<u8>) {
        while self.connection.wants_write() {
            if self.connection.write_tls(out).is_err() {
                return;
            }
        }
    }

    pub(super) fn is_handshaking(&self) -> bool {
        self.connection.is_handshaking()
    }

    /// Whether the peer said that nothing more comes.
    pub(super) const fn is_closed(&self) -> bool {
        self.is_closed
    }

    pub(super) fn peer_certificates(&self) -> Vec<CertificateDer<'static>> {
        self.connection.peer_certificates().map(<[_]>::to_vec).unwrap_or_default()
    }

    /// Fills `out` by the exporter (RFC 5705), without a context.
    pub(super) fn export(&self, out: &mut [u8], label: &[u8]) -> Result<(), rustls::Error> {
        self.connection.export_keying_material(out, label, None).map(|_| ())
    }
}
