//! Generic netlink, which the families openvswitch and ovpn use (`linux/genetlink.h`).

use std::io;

use netlink_sys::protocols::NETLINK_GENERIC;
use rustix::io::Errno;

use super::{
    error::RequestError,
    exchange::Exchange,
    notices::Notices,
    reader::{Message, attribute, attributes, text, u16_at, u32_at},
    socket::RECEIVE_BUFFER_BYTES,
    writer::{Answer, Writer},
};

/// Length of `struct genlmsghdr`.
const GENERIC_HEADER_LEN: usize = 4;

/// The controller's own, fixed family number (GENL_ID_CTRL).
const CONTROLLER: u16 = 0x10;
const CONTROLLER_VERSION: u8 = 2;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
const CTRL_ATTR_MCAST_GROUPS: u16 = 7;
const CTRL_ATTR_MCAST_GRP_NAME: u16 = 1;
const CTRL_ATTR_MCAST_GRP_ID: u16 = 2;

/// A family's number and groups, as the controller reports them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct FamilyInfo {
    /// Its number, which is the type of its messages.
    pub(crate) id: u16,
    /// Its multicast groups by name.
    pub(crate) groups: Vec<(String, u32)>,
}

/// A socket for requests.
pub(crate) struct Requests {
    exchange: Exchange,
}

impl Requests {
    /// Opens a socket in the calling thread's network namespace.
    pub(crate) fn open() -> io::Result<Self> {
        Ok(Self { exchange: Exchange::open(NETLINK_GENERIC, RECEIVE_BUFFER_BYTES)? })
    }

    /// Looks a family up, which makes the kernel load its module if it can. `None` if it has no such family.
    pub(crate) async fn family(&mut self, name: &str) -> Result<Option<FamilyInfo>, RequestError> {
        match self.run(get_family(name)).await {
            Err(error) if error.is(Errno::NOENT) => Ok(None),
            answer => Ok(answer?.first().and_then(|body| family_info(body))),
        }
    }

    /// One request and the bodies of its answer.
    pub(crate) async fn run(&mut self, request: Writer) -> Result<Vec<Vec<u8>>, RequestError> {
        self.exchange.request(request, body).await
    }

    /// Reads a listing, and reads it again if it changed meanwhile.
    pub(crate) async fn dump(&mut self, request: Writer) -> Result<Vec<Vec<u8>>, RequestError> {
        self.exchange.dump(request, body).await
    }
}

/// Opens a socket for notices in the calling thread's network namespace.
pub(crate) fn notices() -> io::Result<Notices> {
    Notices::open(NETLINK_GENERIC, 0, RECEIVE_BUFFER_BYTES)
}

/// Begins a request to a family.
pub(crate) fn request(family: u16, version: u8, command: u8, answer: Answer) -> Writer {
    let mut request = Writer::request(family, answer);
    request.raw(&[command, version, 0, 0]);
    request
}

/// Begins a request that contains keys: see [`Writer::secret_request`].
pub(crate) fn secret_request(
    family: u16,
    version: u8,
    command: u8,
    answer: Answer,
    capacity: usize,
) -> Writer {
    let mut request = Writer::secret_request(family, answer, capacity);
    request.raw(&[command, version, 0, 0]);
    request
}

/// The command of a family's message, and what comes after it.
pub(crate) fn command<'a>(message: &Message<'a>) -> Option<(u8, &'a [u8])> {
    Some((*message.body.first()?, message.body.get(GENERIC_HEADER_LEN..)?))
}

fn body(message: &Message<'_>) -> Option<Vec<u8>> {
    command(message).map(|(_, body)| body.to_vec())
}

/// Asks the controller for a family by name.
pub(crate) fn get_family(name: &str) -> Writer {
    let answer = Answer::Acknowledgement;
    let mut request = request(CONTROLLER, CONTROLLER_VERSION, CTRL_CMD_GETFAMILY, answer);
    request.text(CTRL_ATTR_FAMILY_NAME, name);
    request
}

/// Reads the controller's answer (the attributes after the generic header).
pub(crate) fn family_info(body: &[u8]) -> Option<FamilyInfo> {
    let id = u16_at(attribute(body, CTRL_ATTR_FAMILY_ID)?, 0)?;
    let list = attribute(body, CTRL_ATTR_MCAST_GROUPS).unwrap_or_default();
    let group = |(_, entry)| {
        let name = text(attribute(entry, CTRL_ATTR_MCAST_GRP_NAME)?);
        Some((name, u32_at(attribute(entry, CTRL_ATTR_MCAST_GRP_ID)?, 0)?))
    };
    Some(FamilyInfo { id, groups: attributes(list).filter_map(group).collect() })
}
