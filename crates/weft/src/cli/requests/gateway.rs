//! What asks the daemon about its OpenVPN gateway.

use std::io::{BufRead, IsTerminal, Read};

use anyhow::{Context, bail};
use weft_api::call;
use weft_api::{
    Authority, Client, ClientProfile, ClientRequest, Gateway, MoveRequest, Password,
    RestoreRequest, Revoked, SharedProfile, SharedRequest, TotpRequest, UserChanged, UserName,
    UserRequest, VpnUser,
};
use zeroize::Zeroizing;

use crate::cli::args::{
    CaCommand, OpenvpnCommand, OpenvpnProfileArgs, OpenvpnServeArgs, OpenvpnUserCommand,
    OpenvpnUserTotpArgs,
};
use crate::cli::output;
use crate::openvpn::connect::ask;

/// The longest line that is read as a password, in bytes.
const PASSWORD_BYTES_MAX: u64 = 1_024;

pub(super) async fn openvpn(command: OpenvpnCommand, daemon: &Client) -> anyhow::Result<()> {
    match command {
        OpenvpnCommand::Serve(args) => serve(*args, daemon).await,
        OpenvpnCommand::Stop(args) => {
            let gateway: Gateway = daemon.ask::<call::ServeStop>().await?;
            output::print(args.json, &gateway, output::gateway)
        }
        OpenvpnCommand::Import(args) => crate::openvpn::import::run(args, daemon).await,
        OpenvpnCommand::Client(args) => profile(args, daemon).await,
        OpenvpnCommand::Revoke(args) => {
            let request = ClientRequest { name: args.name };
            let revoked: Revoked = daemon.call::<call::ClientRevoke>(&request).await?;
            output::print(args.json, &revoked, output::revoked)
        }
        OpenvpnCommand::User(command) => user(command, daemon).await,
        OpenvpnCommand::Connect(_) => bail!("this command does not ask the daemon"),
    }
}

pub(super) async fn authority(command: CaCommand, daemon: &Client) -> anyhow::Result<()> {
    let (authority, json): (Authority, bool) = match command {
        CaCommand::Init(args) => (daemon.ask::<call::AuthorityInit>().await?, args.json),
        CaCommand::Move(args) => {
            let request = MoveRequest { host: args.host };
            (daemon.call::<call::AuthorityMove>(&request).await?, args.json)
        }
        CaCommand::Restore(args) => {
            let text = Zeroizing::new(
                std::fs::read_to_string(&args.file)
                    .with_context(|| format!("cannot read {}", args.file.display()))?,
            );
            let request = RestoreRequest { authority: Password::new(text.as_str()) };
            (daemon.call::<call::AuthorityRestore>(&request).await?, args.json)
        }
    };
    output::print(json, &authority, output::authority)
}

async fn serve(args: OpenvpnServeArgs, daemon: &Client) -> anyhow::Result<()> {
    let request = args.options.request()?;
    let gateway: Gateway = daemon.call::<call::Serve>(&request).await?;
    output::print(args.json, &gateway, output::gateway)
}

async fn profile(args: OpenvpnProfileArgs, daemon: &Client) -> anyhow::Result<()> {
    let OpenvpnProfileArgs { name, totp, qr, json, .. } = args;
    let Some(name) = name else {
        let request = SharedRequest { totp };
        let shared: SharedProfile = daemon.call::<call::ClientShared>(&request).await?;
        return print_profile(qr, json, &shared, &shared.profile);
    };
    let profile: ClientProfile = daemon.call::<call::ClientIssue>(&ClientRequest { name }).await?;
    print_profile(qr, json, &profile, &profile.profile)
}

fn print_profile<T: serde::Serialize>(
    qr: bool,
    json: bool,
    answer: &T,
    profile: &str,
) -> anyhow::Result<()> {
    let text = if qr { crate::openvpn::qr::shown(profile)? } else { profile.to_owned() };
    output::print(json, answer, |_| text)
}

async fn user(command: OpenvpnUserCommand, daemon: &Client) -> anyhow::Result<()> {
    let (changed, json): (UserChanged, bool) = match command {
        OpenvpnUserCommand::Add(args) => {
            let (name, totp) = (args.name, args.totp);
            let request = UserRequest { name, password: new_password().await?, totp };
            (daemon.call::<call::UserAdd>(&request).await?, args.json)
        }
        OpenvpnUserCommand::Passwd(args) => {
            let password = new_password().await?;
            let request = UserRequest { name: args.name, password, totp: false };
            (daemon.call::<call::UserPassword>(&request).await?, args.json)
        }
        OpenvpnUserCommand::Totp(OpenvpnUserTotpArgs { name, off, json }) => {
            (daemon.call::<call::UserTotp>(&TotpRequest { name, off }).await?, json)
        }
        OpenvpnUserCommand::Rm(args) => {
            let request = UserName { name: args.name };
            (daemon.call::<call::UserRemove>(&request).await?, args.json)
        }
        OpenvpnUserCommand::Ls(args) => {
            let users: Vec<VpnUser> = daemon.ask::<call::Users>().await?;
            return output::print(args.json, &users, |users| output::vpn_users(users));
        }
    };
    output::print(json, &changed, output::user_changed)
}

/// A new password: asked for twice at the terminal, or the first line of standard input.
async fn new_password() -> anyhow::Result<Password> {
    let stdin = std::io::stdin();
    if stdin.is_terminal() {
        let first = ask("New password: ", false).await?;
        let again = ask("The same again: ", false).await?;
        if first != again {
            bail!("the two passwords differ; nothing was changed");
        }
        return Ok(Password::new(first.expose()));
    }
    let mut line = Zeroizing::new(String::new());
    std::io::BufReader::new(stdin.lock().take(PASSWORD_BYTES_MAX)).read_line(&mut line)?;
    Ok(Password::new(line.trim_end_matches(['\r', '\n'])))
}
