//! The CNI plugin: containers of containerd, CRI-O, podman and nerdctl.
//!
//! A runtime runs the plugin for each command, with parameters in the environment and a configuration on
//! standard input. [`Request::parse`] checks both. [`execute`] asks the daemon through [`Daemon`], and
//! yields the [`Outcome`]: text for standard output, and an exit code. The daemon keeps [`Deletions`]
//! and reads [`Tombstones`], so that no late ADD brings back what a DEL took away; [`Reaper`] finds
//! attachments whose DEL never came. [`setup`] installs the plugin.

mod address;
mod call;
mod config;
mod daemon;
mod deletions;
mod environment;
mod error;
mod fields;
mod files;
mod merge;
mod plugin;
mod reap;
mod request;
mod result;
pub mod setup;
mod tombstone;
mod version;

pub use self::{
    address::RequestedAddress,
    call::{
        Answer, ApiDaemon, CniAttach, CniAttachments, CniCheck, CniDetach, CniStatus, StatusRequest,
    },
    config::{
        CONFIG_BYTES_MAX, LIST_ENTRIES_MAX, PLUGIN_NAME, PORT_MAPPINGS_MAX,
        REQUESTED_ADDRESSES_MAX, TEXT_BYTES_MAX, ValidAttachment, read_config,
    },
    daemon::{
        Attach, Attached, Checked, Daemon, DaemonError, Detach, Key, Listed, NamespaceFile,
        PortMapping, Readiness, Refusal, Target, Wishes,
    },
    deletions::{DEL_REMEMBERED_MS, DELS_MAX, Deletions},
    environment::{
        ARGS_BYTES_MAX, ARGS_PAIRS_MAX, CONTAINER_ID_BYTES_MAX, Command, Environment,
        INTERFACE_BYTES_MAX, NAMESPACE_PATH_BYTES_MAX, Owner,
    },
    error::{CniError, Code},
    plugin::{
        ATTACH_TIMEOUT_MS, CHECK_TIMEOUT_MS, DETACH_TIMEOUT_MS, GC_TIMEOUT_MS, Host, Outcome,
        STATUS_TIMEOUT_MS, UNDO_TIMEOUT_MS, UNLINK_TIMEOUT_MS, execute, now_ns,
    },
    reap::{
        BOOT_ID_FILE, NAMESPACE_GONE_MS, Presence, Reaper, boot_id, is_of_earlier_boot, presence,
    },
    request::{Action, Add, Check, Del, Gc, Rejected, Request},
    result::{Address, CniResult, Dns, Interface, Route},
    tombstone::{
        Found, TOMBSTONE_BYTES_MAX, TOMBSTONES_DIR, TOMBSTONES_MAX, Tombstone, Tombstones,
    },
    version::Version,
};
