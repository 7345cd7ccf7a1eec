//! What a client has on this host, and what outlives a session.

use weft_openvpn::config::ClientProfile;

use super::host::HostSide;
use super::login::Login;
use super::report::Report;
use super::signals::Signals;
use super::tunnel::Tunnel;

/// What the sessions of a client share.
pub(super) struct Holdings {
    pub(super) profile: ClientProfile,
    pub(super) report: Report,
    pub(super) signals: Signals,
    pub(super) login: Login,
    pub(super) host: HostSide,
    pub(super) tunnel: Tunnel,
}
