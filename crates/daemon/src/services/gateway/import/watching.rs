//! By what programs watch an imported server: its status file and its management interface.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use weft_api::{ManagementPlace, ToolSettings};
use weft_openvpn::config::{Management, ServerSettings};

use crate::services::gateway::management::Password;
use crate::services::gateway::secret_file::first_line;
use crate::services::gateway::tools::{INTERVAL_MAX_S, name_of};

/// Why a line is refused.
pub(super) const NO_NAME: &str =
    "the file or socket needs a name of at most 64 bytes without a dot in front: name another";
const OTHER_HOSTS: &str = "other hosts could connect to the management interface: write 127.0.0.1";
const NO_PASSWORD: &str = "all users of the host could connect to the management interface: \
    write a file with its password behind the port, or unix in the place of the port";
/// Tells where the file or socket of a line is found.
const STATUS: &str = "its name is in the directory openvpn of Weft's runtime directory, \
    such as /run/weft/openvpn: let programs read it there, or link to it";

/// What the configuration says of it; what Weft cannot have is left out.
pub(super) fn tools(settings: &ServerSettings) -> ToolSettings {
    let ServerSettings { status, status_version, .. } = settings;
    let interval = status.as_ref().map(|file| file.interval_s.clamp(1, INTERVAL_MAX_S));
    ToolSettings {
        status_file: status.as_ref().and_then(|file| name_of(&file.path)),
        status_interval_s: interval,
        status_version: Some(*status_version),
        management: place(settings).unwrap_or_default(),
        management_password: None,
    }
}

/// The password of the management interface, by the file that the configuration names.
pub(super) fn password(settings: &ServerSettings) -> Option<Password> {
    let password = settings.management.as_ref()?.password.as_ref()?;
    first_line(password.expose().as_bytes())
}

/// Settings with what the configuration says where they say nothing.
pub(super) fn filled(said: ToolSettings, own: ToolSettings) -> ToolSettings {
    ToolSettings {
        status_file: said.status_file.or(own.status_file),
        status_interval_s: said.status_interval_s.or(own.status_interval_s),
        status_version: said.status_version.or(own.status_version),
        management: said.management.or(own.management),
        management_password: said.management_password,
    }
}

/// Where the management interface of a configuration listens.
///
/// # Errors
/// Why it cannot be had.
fn place(settings: &ServerSettings) -> Result<Option<ManagementPlace>, &'static str> {
    let Some(Management { address, port, password }) = &settings.management else {
        return Ok(None);
    };
    let Some(port) = port else {
        let name: PathBuf = name_of(address).ok_or(NO_NAME)?;
        return Ok(Some(ManagementPlace::Unix(name)));
    };
    let host = match address.as_str() {
        "localhost" => Some(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        address => address.parse().ok(),
    };
    let host = host.filter(IpAddr::is_loopback).ok_or(OTHER_HOSTS)?;
    let is_empty = password.as_ref().is_none_or(|it| first_line(it.expose().as_bytes()).is_none());
    match is_empty {
        true => Err(NO_PASSWORD),
        false => Ok(Some(ManagementPlace::Tcp(SocketAddr::new(host, *port)))),
    }
}

/// Why a line `status` or `management` is refused; `None`: it is taken.
pub(super) fn fault(directive: &str, settings: &ServerSettings) -> Option<&'static str> {
    match directive {
        "status" => {
            let file = settings.status.as_ref()?;
            name_of(&file.path).is_none().then_some(NO_NAME)
        }
        "management" => place(settings).err(),
        _ => None,
    }
}

/// The remark for a line that is taken over; `None`: it needs none.
pub(super) fn note(directive: &str, settings: &ServerSettings) -> Option<&'static str> {
    let is_unix = settings.management.as_ref().is_some_and(|it| it.port.is_none());
    match directive {
        "status" => Some(STATUS),
        "management" if is_unix => Some(STATUS),
        _ => None,
    }
}
