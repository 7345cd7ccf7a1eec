//! The requests of the local API, each with its path, its body and its answer.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{gateway, import, login, networks, types};

/// HTTP method of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// A request that only reads.
    Get,
    /// A request that changes state.
    Post,
}

/// A request that a daemon answers.
pub trait Call {
    /// HTTP method.
    const METHOD: Method;
    /// Path, such as `/v1/status`.
    const PATH: &'static str;
    /// JSON body of the request; [`Nothing`] for none.
    type Request: Serialize + DeserializeOwned + Send + Sync + 'static;
    /// JSON body of the answer.
    type Answer: Serialize + DeserializeOwned + Send + 'static;
}

/// A body without content: an empty JSON object. Unknown fields are ignored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, serde::Deserialize)]
pub struct Nothing {}

/// Defines calls: for each its documentation, then `NAME = METHOD "PATH" REQUEST => ANSWER;`.
#[macro_export]
macro_rules! calls {
    ($($(#[doc = $doc:literal])* $name:ident = $method:ident $path:literal $request:ty => $answer:ty;)*) => {$(
        #[doc = concat!("`", stringify!($method), " ", $path, "`.")]
        $(#[doc = $doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $name;

        impl $crate::call::Call for $name {
            const METHOD: $crate::call::Method = $crate::call::Method::$method;
            const PATH: &'static str = $path;
            type Request = $request;
            type Answer = $answer;
        }
    )*};
}

calls! {
    /// The host at a glance.
    Status = Get "/v1/status" Nothing => types::Status;
    /// Connections to peers.
    Connections = Get "/v1/connections" Nothing => Vec<types::Connection>;
    /// Candidates of each peer, by preference.
    Paths = Get "/v1/paths" Nothing => Vec<types::Path>;
    /// Known peers and their connections.
    Peers = Get "/v1/peers" Nothing => Vec<types::Peer>;
    /// Addresses that this host dials.
    Targets = Get "/v1/targets" Nothing => Vec<types::Target>;
    /// Address ranges and their owners.
    Ipam = Get "/v1/ipam" Nothing => types::Ipam;
    /// Attached containers.
    Attachments = Get "/v1/attachments" Nothing => Vec<types::Attachment>;
    /// Everything at once, with all counters.
    Report = Get "/v1/report" Nothing => types::Report;
    /// Counters for computing rates.
    Traffic = Get "/v1/traffic" Nothing => types::Traffic;
    /// Threads of the vector engine.
    Workers = Get "/v1/workers" Nothing => types::Workers;
    /// Changes the number of threads.
    SetWorkers = Post "/v1/workers" types::WorkersRequest => types::Workers;
    /// Gives a container an interface and addresses.
    Attach = Post "/v1/attach" types::AttachRequest => types::Attachment;
    /// Removes the interface and its addresses.
    Detach = Post "/v1/detach" types::DetachRequest => types::Detached;
    /// Gives this host an interface and addresses.
    Expose = Post "/v1/expose" types::ExposeRequest => types::Attachment;
    /// Takes back all addresses of this host, or some.
    Hide = Post "/v1/hide" types::HideRequest => types::Hidden;
    /// Networks that this host holds or knows from others.
    Networks = Get "/v1/networks" Nothing => Vec<networks::Network>;
    /// Creates a network, or keeps one that is equal.
    NetworkCreate = Post "/v1/networks/create" networks::NetworkCreateRequest => networks::Network;
    /// Removes a network from this host.
    NetworkRemove = Post "/v1/networks/remove" networks::NetworkRemoveRequest => networks::Network;
    /// Adds hosts to dial.
    Connect = Post "/v1/connect" types::ConnectRequest => Vec<types::Target>;
    /// Stops dialling hosts.
    Forget = Post "/v1/forget" types::ForgetRequest => Vec<types::Target>;
    /// Looks up a name or an address, as DNS answers it.
    DnsLookup = Post "/v1/dns/lookup" types::DnsLookupRequest => Vec<types::DnsRecord>;
    /// Gives addresses a name.
    DnsAdd = Post "/v1/dns/add" types::DnsAddRequest => Vec<types::DnsName>;
    /// Takes a name that was given by hand, or some of its addresses, back.
    DnsRemove = Post "/v1/dns/remove" types::DnsRemoveRequest => Vec<types::DnsName>;
    /// Makes the certificate authority of OpenVPN clients.
    AuthorityInit = Post "/v1/openvpn/ca" Nothing => gateway::Authority;
    /// Makes another host the authority's home.
    AuthorityMove = Post "/v1/openvpn/ca/move" gateway::MoveRequest => gateway::Authority;
    /// Makes this host the authority's home, by a backup.
    AuthorityRestore = Post "/v1/openvpn/ca/restore" gateway::RestoreRequest => gateway::Authority;
    /// Serves OpenVPN clients.
    Serve = Post "/v1/openvpn/serve" gateway::ServeRequest => gateway::Gateway;
    /// Ends that.
    ServeStop = Post "/v1/openvpn/stop" Nothing => gateway::Gateway;
    /// Takes the configuration of an OpenVPN server over, or only reports on it.
    Import = Post "/v1/openvpn/import" import::ImportRequest => import::ImportReport;
    /// Replaces the list of revoked certificates of a configuration that was taken over.
    ImportCrl = Post "/v1/openvpn/crl" import::CrlRequest => import::ImportReport;
    /// Issues a certificate, and writes a profile.
    ClientIssue = Post "/v1/openvpn/client" gateway::ClientRequest => gateway::ClientProfile;
    /// Writes a profile without a certificate.
    ClientShared = Post "/v1/openvpn/shared" login::SharedRequest => login::SharedProfile;
    /// Adds a user with a password.
    UserAdd = Post "/v1/openvpn/users/add" login::UserRequest => login::UserChanged;
    /// Changes a user's password, and ends the sessions that were opened with the old one.
    UserPassword = Post "/v1/openvpn/users/password" login::UserRequest => login::UserChanged;
    /// Changes whether a user's logins need codes, and ends the user's sessions.
    UserTotp = Post "/v1/openvpn/users/totp" login::TotpRequest => login::UserChanged;
    /// Removes a user, and ends the sessions.
    UserRemove = Post "/v1/openvpn/users/remove" login::UserName => login::UserChanged;
    /// Users who may log in with a password.
    Users = Get "/v1/openvpn/users" Nothing => Vec<login::VpnUser>;
    /// Revokes a client's certificates.
    ClientRevoke = Post "/v1/openvpn/revoke" gateway::ClientRequest => gateway::Revoked;
    /// Connected clients.
    Clients = Get "/v1/openvpn/clients" Nothing => Vec<gateway::VpnClient>;
    /// Makes a one-time token.
    Token = Post "/v1/token" Nothing => types::Invitation;
    /// Ends the daemon.
    Stop = Post "/v1/stop" Nothing => Nothing;
}
