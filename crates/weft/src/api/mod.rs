//! The local API: JSON over HTTP on a unix socket, spoken by the CLI and by other people's scripts.
//!
//! | request | body | answer |
//! | --- | --- | --- |
//! | `GET /v1/status` | | [`Status`] |
//! | `GET /v1/connections` | | list of [`Connection`] |
//! | `GET /v1/paths` | | list of [`Path`] |
//! | `GET /v1/peers` | | list of [`Peer`] |
//! | `GET /v1/targets` | | list of [`Target`] |
//! | `GET /v1/ipam` | | [`Ipam`] |
//! | `GET /v1/attachments` | | list of [`Attachment`] |
//! | `GET /v1/report` | | [`Report`] |
//! | `GET /v1/traffic` | | [`Traffic`] |
//! | `GET /v1/workers` | | [`Workers`] |
//! | `POST /v1/workers` | [`WorkersRequest`] | [`Workers`] |
//! | `POST /v1/attach` | [`AttachRequest`] | [`Attachment`] |
//! | `POST /v1/detach` | [`DetachRequest`] | [`Detached`] |
//! | `POST /v1/connect` | [`ConnectRequest`] | list of [`Target`] |
//! | `POST /v1/forget` | [`ForgetRequest`] | list of [`Target`] |
//! | `POST /v1/token` | | [`Invitation`] |
//! | `POST /v1/stop` | | empty object |
//!
//! A refusal is an [`ApiError`] with the HTTP status of its [`ErrorKind`].

mod client;
mod server;
mod types;

pub(crate) use client::socket_path;
pub use client::{Client, ClientError};
pub use server::{Answer, ApiListener, RequestSender, listen, serve};
pub(crate) use server::{reply, serve_router};
pub use types::{
    ApiError, AttachRequest, Attachment, ConnectRequest, Connection, ContainerTraffic,
    DetachRequest, Detached, ErrorKind, FirewallRule, ForgetRequest, HostRange, Invitation, Ipam,
    LaneTraffic, Path, Peer, PeerConnection, PeerTraffic, Report, Status, Target, Traffic, Volume,
    WorkerTraffic, Workers, WorkersRequest,
};
