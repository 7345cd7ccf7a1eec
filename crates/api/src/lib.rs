//! tokio: requests and answers of the local API, its client, HTTP over unix sockets.
//!
//! The API is JSON over HTTP on a unix socket, used by the CLI and by third-party scripts. [`call`] lists all
//! requests; the client and the daemon's routes are both built from it. A refusal is an [`ApiError`] with the
//! HTTP status of its [`ErrorKind`].
#![forbid(unsafe_code)]

pub mod call;
mod client;
mod error;
mod gateway;
mod http;
mod import;
mod listen;
mod login;
mod networks;
mod oidc;
mod rate;
mod server;
mod tools;
mod types;

pub use call::Call;
pub use client::{Client, ClientError, socket_path};
pub use error::{ApiError, ErrorKind};
pub use gateway::{
    ADDRESSES_FIRST_HOST, Authority, AuthorityHome, ClientProfile, ClientRequest, Gateway,
    MoveRequest, OtherGateway, RestoreRequest, Revoked, ServeEngine, ServeRequest, VpnClient,
};
pub use http::{HttpError, HttpLimits, HttpLines, HttpRequest};
pub use import::{CrlRequest, ImportReport, ImportRequest, ImportedLine};
pub use listen::{Listen, ListenError, Protocol};
pub use login::{
    Auth, ClientName, LoginSettings, Password, SharedProfile, SharedRequest, TotpRequest,
    UnknownWord, UserChanged, UserName, UserRequest, VpnUser,
};
pub use networks::{Network, NetworkCreateRequest, NetworkHost, NetworkRemoveRequest};
pub use oidc::OidcSettings;
pub use rate::{Rate, RateError};
pub use server::{ApiListener, Routes, is_answered, listen, reply, serve};
pub use tools::{ManagementPlace, ToolSettings};
pub use types::*;
