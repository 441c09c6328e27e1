//! A relay to the executor, which gives connections another source address, or the delay of a
//! distant workstation.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::Result;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::sleep;

/// The abuser's address. The whole of 127.0.0.0/8 is this machine.
pub const ABUSER_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 66));
const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const BUFFER_BYTES: usize = 64 << 10;

/// Relays from a port of 127.0.0.1, which is returned, for as long as the runtime lives.
pub async fn start(to_port: u16, from: IpAddr, one_way: Duration) -> Result<u16> {
    let listener = TcpListener::bind((LOCAL, 0)).await?;
    let port = listener.local_addr()?.port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                if let Ok(onward) = connect(to_port, from).await {
                    relay(stream, onward, one_way);
                }
            });
        }
    });
    Ok(port)
}

/// Connects to a port of 127.0.0.1 from that address.
pub async fn connect(to_port: u16, from: IpAddr) -> Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddr::new(from, 0))?;
    Ok(socket.connect(SocketAddr::new(LOCAL, to_port)).await?)
}

fn relay(near: TcpStream, far: TcpStream, one_way: Duration) {
    let _ = (near.set_nodelay(true), far.set_nodelay(true));
    let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
    tokio::spawn(copy(near_in, far_out, one_way));
    tokio::spawn(copy(far_in, near_out, one_way));
}

/// Copies to the end, and passes the end on.
async fn copy(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, one_way: Duration) {
    let mut buffer = vec![0; BUFFER_BYTES];
    while let Ok(count) = from.read(&mut buffer).await {
        if !one_way.is_zero() {
            sleep(one_way).await;
        }
        if count == 0 || to.write_all(&buffer[..count]).await.is_err() {
            break;
        }
    }
}
